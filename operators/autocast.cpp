// The operators under torch.autocast: q, k and v in autocast's type; w, beta and g, whose rounding would be felt by every later token, in float32.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "operators/schema.h"

namespace pathattn::operators {
namespace {

template <c10::DeviceType kDevice>
std::tuple<at::Tensor, at::Tensor> path_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                                  const OptionalTensor& beta, const OptionalTensor& g, std::optional<double> scale,
                                                  const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto narrow = [type = at::autocast::get_autocast_dtype(kDevice)](const at::Tensor& x) { return at::autocast::cached_cast(type, x, kDevice); };
  const auto wide = [](const OptionalTensor& x) { return at::autocast::cached_cast(at::kFloat, x, kDevice); };
  static const auto op = dispatched<PathAttentionSignature>("pathattn::path_attention");
  return op.call(narrow(q), narrow(k), narrow(v), wide(w), wide(beta), wide(g), scale, cu_seqlens, gate_scaled);
}

template <c10::DeviceType kDevice>
std::tuple<at::Tensor, at::Tensor> stick_breaking_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                            std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  const c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto narrow = [type = at::autocast::get_autocast_dtype(kDevice)](const at::Tensor& x) { return at::autocast::cached_cast(type, x, kDevice); };
  static const auto op = dispatched<StickBreakingSignature>("pathattn::stick_breaking_attention");
  return op.call(narrow(q), narrow(k), narrow(v), scale, cu_seqlens);
}

template <c10::DeviceType kDevice>
void implement(torch::Library& m) {
  m.impl("path_attention", path_attention<kDevice>);
  m.impl("stick_breaking_attention", stick_breaking_attention<kDevice>);
}

}  // namespace

TORCH_LIBRARY_IMPL(pathattn, AutocastCPU, m) { implement<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(pathattn, AutocastCUDA, m) { implement<c10::DeviceType::CUDA>(m); }

}  // namespace pathattn::operators
