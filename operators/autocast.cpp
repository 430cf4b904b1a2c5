// The operators under torch.autocast: q, k and v in autocast's type or, beside a decoding state, in the state's; w, beta and g, whose rounding would
// be felt by every later token, in float32 (float64 beside a float64 state).
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "operators/schema.h"

namespace pathattn::operators {
namespace {

// An operator's inputs, q, k and v in `type`; what autocast does not cast (float64, integers) is the operator's to refuse.
template <c10::DeviceType kDevice>
struct Casts {
  at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
  c10::impl::ExcludeDispatchKeyGuard below{at::autocast::get_autocast_dispatch_key_from_device_type(kDevice)};

  at::Tensor narrow(const at::Tensor& x) const { return at::autocast::cached_cast(type, x, kDevice); }
  OptionalTensor wide(const OptionalTensor& x) const { return at::autocast::cached_cast(compute_type(type), x, kDevice); }
};

template <c10::DeviceType kDevice>
std::tuple<at::Tensor, at::Tensor> path_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                                  const OptionalTensor& beta, const OptionalTensor& g, std::optional<double> scale,
                                                  const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const Casts<kDevice> cast;
  static const auto op = dispatched<PathAttentionSignature>("pathattn::path_attention");
  return op.call(cast.narrow(q), cast.narrow(k), cast.narrow(v), cast.wide(w), cast.wide(beta), cast.wide(g), scale, cu_seqlens, gate_scaled);
}

template <c10::DeviceType kDevice>
std::tuple<at::Tensor, at::Tensor> stick_breaking_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                            std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  const Casts<kDevice> cast;
  static const auto op = dispatched<StickBreakingSignature>("pathattn::stick_breaking_attention");
  return op.call(cast.narrow(q), cast.narrow(k), cast.narrow(v), scale, cu_seqlens);
}

template <c10::DeviceType kDevice>
at::Tensor prefill(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                   const OptionalTensor& g, at::Tensor& keys, at::Tensor& values, const OptionalTensor& gate_sums, const OptionalTensor& carries,
                   const OptionalTensor& open_keys, const OptionalTensor& open_carry, at::Tensor& lengths, std::optional<double> scale,
                   const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const Casts<kDevice> cast{.type = keys.scalar_type()};
  static const auto op = dispatched<PrefillSignature>("pathattn::prefill");
  return op.call(cast.narrow(q), cast.narrow(k), cast.narrow(v), cast.wide(w), cast.wide(beta), cast.wide(g), keys, values, gate_sums, carries,
                 open_keys, open_carry, lengths, scale, cu_seqlens, gate_scaled);
}

template <c10::DeviceType kDevice>
at::Tensor decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                  const OptionalTensor& g, at::Tensor& keys, at::Tensor& values, const OptionalTensor& gate_sums, const OptionalTensor& carries,
                  const OptionalTensor& open_keys, const OptionalTensor& open_carry, at::Tensor& lengths, std::optional<double> scale,
                  bool gate_scaled) {
  const Casts<kDevice> cast{.type = keys.scalar_type()};
  static const auto op = dispatched<DecodeSignature>("pathattn::decode");
  return op.call(cast.narrow(q), cast.narrow(k), cast.narrow(v), cast.wide(w), cast.wide(beta), cast.wide(g), keys, values, gate_sums, carries,
                 open_keys, open_carry, lengths, scale, gate_scaled);
}

template <c10::DeviceType kDevice>
void implement(torch::Library& m) {
  m.impl("path_attention", path_attention<kDevice>);
  m.impl("prefill", prefill<kDevice>);
  m.impl("decode", decode<kDevice>);
  m.impl("stick_breaking_attention", stick_breaking_attention<kDevice>);
}

}  // namespace

TORCH_LIBRARY_IMPL(pathattn, AutocastCPU, m) { implement<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(pathattn, AutocastCUDA, m) { implement<c10::DeviceType::CUDA>(m); }

}  // namespace pathattn::operators
