#include "operators/stick_breaking.h"

#include <torch/library.h>

#include "operators/schema.h"

namespace pathattn {

TORCH_LIBRARY_FRAGMENT(pathattn, m) {
  m.def("stick_breaking_attention(Tensor q, Tensor k, Tensor v, *, float? scale=None, Tensor? cu_seqlens=None) -> (Tensor o, Tensor rest)");
  m.def(
      "stick_breaking_attention_backward(Tensor q, Tensor k, Tensor v, Tensor d_o, Tensor? d_rest, *, float? scale=None, Tensor? cu_seqlens=None) "
      "-> (Tensor dq, Tensor dk, Tensor dv)");
}

std::tuple<at::Tensor, at::Tensor> stick_breaking_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                            std::optional<double> scale, const std::optional<at::Tensor>& cu_seqlens) {
  static const auto op = operators::dispatched<operators::StickBreakingSignature>("pathattn::stick_breaking_attention");
  return op.call(q, k, v, scale, cu_seqlens);
}

}  // namespace pathattn
