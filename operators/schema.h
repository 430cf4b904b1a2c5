// The operators' signatures in C++ (path_attention.cpp and stick_breaking.cpp have their schemas), and calls by way of PyTorch's dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "operators/arguments.h"

namespace pathattn::operators {

using PathAttentionSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                  const OptionalTensor& w, const OptionalTensor& beta, const OptionalTensor& g,
                                                                  std::optional<double> scale, const OptionalTensor& cu_seqlens, bool gate_scaled);
using PathAttentionWithRestSignature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                                      const OptionalTensor& w, const OptionalTensor& beta,
                                                                                      const OptionalTensor& g, std::optional<double> scale,
                                                                                      const OptionalTensor& cu_seqlens, bool gate_scaled);
using PathAttentionBackwardSignature = Gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                                 const OptionalTensor& beta, const OptionalTensor& g, const at::Tensor& o, const at::Tensor& lse,
                                                 const at::Tensor& d_o, const OptionalTensor& d_lse, std::optional<double> scale,
                                                 const OptionalTensor& cu_seqlens, bool gate_scaled, const OptionalTensor& o_rest);
using PrefillSignature = at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                    const OptionalTensor& beta, const OptionalTensor& g, at::Tensor& keys, at::Tensor& values,
                                    const OptionalTensor& gate_sums, const OptionalTensor& carries, const OptionalTensor& open_keys,
                                    const OptionalTensor& open_carry, at::Tensor& lengths, std::optional<double> scale,
                                    const OptionalTensor& cu_seqlens, bool gate_scaled);
using DecodeSignature = at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                                   const OptionalTensor& g, at::Tensor& keys, at::Tensor& values, const OptionalTensor& gate_sums,
                                   const OptionalTensor& carries, const OptionalTensor& open_keys, const OptionalTensor& open_carry,
                                   at::Tensor& lengths, std::optional<double> scale, bool gate_scaled);

using StickBreakingSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                  std::optional<double> scale, const OptionalTensor& cu_seqlens);
using StickBreakingBackwardSignature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                                      const at::Tensor& d_o, const OptionalTensor& d_rest,
                                                                                      std::optional<double> scale, const OptionalTensor& cu_seqlens);

// Finds autograd, the device's kernel and tracing. Look it up once: `static const auto op = ...`.
template <typename Signature>
c10::TypedOperatorHandle<Signature> dispatched(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace pathattn::operators
