#include "operators/path_attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "operators/schema.h"

namespace pathattn {
namespace {

using operators::OptionalTensor;

OptionalTensor optional(const at::Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

OptionalTensor in_compute_type(const OptionalTensor& tensor, const at::Tensor& q) {
  if (!tensor || !tensor->defined() || !tensor->is_floating_point()) return tensor;
  return tensor->to(operators::compute_type(q.scalar_type()));
}

std::vector<at::Tensor> decoding_state(int64_t sequences, int64_t capacity, int64_t query_heads, int64_t key_heads, int64_t key_width,
                                       int64_t value_width, at::ScalarType dtype, bool has_w, bool has_gate, std::optional<at::Device> device) {
  const auto state =
      DecodingTensors::create(sequences, capacity, query_heads, key_heads, key_width, value_width, dtype, has_w, has_gate, device.value_or(at::kCPU));
  return {state.keys, state.values, state.gate_sums, state.carries, state.open_keys, state.open_carry, state.lengths};
}

}  // namespace

TORCH_LIBRARY(pathattn, m) {
  m.def(
      "path_attention(Tensor q, Tensor k, Tensor v, Tensor? w=None, Tensor? beta=None, Tensor? g=None, *, float? scale=None, "
      "Tensor? cu_seqlens=None, bool gate_scaled=False) -> (Tensor o, Tensor lse)");
  // CUDA alone: what path_attention calls where 16 bits, a gate and a wanted gradient come together. o_rest is what rounding took from o.
  m.def(
      "path_attention_with_rest(Tensor q, Tensor k, Tensor v, Tensor? w=None, Tensor? beta=None, Tensor? g=None, *, float? scale=None, "
      "Tensor? cu_seqlens=None, bool gate_scaled=False) -> (Tensor o, Tensor lse, Tensor o_rest)");
  m.def(
      "path_attention_backward(Tensor q, Tensor k, Tensor v, Tensor? w, Tensor? beta, Tensor? g, Tensor o, Tensor lse, Tensor d_o, Tensor? d_lse, "
      "*, float? scale=None, Tensor? cu_seqlens=None, bool gate_scaled=False, Tensor? o_rest=None) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dw, Tensor dbeta, Tensor dg)");
  m.def(
      "prefill(Tensor q, Tensor k, Tensor v, Tensor? w, Tensor? beta, Tensor? g, Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? gate_sums, "
      "Tensor(d!)? carries, Tensor(e!)? open_keys, Tensor(f!)? open_carry, Tensor(g!) lengths, *, float? scale=None, Tensor? cu_seqlens=None, "
      "bool gate_scaled=False) -> Tensor");
  m.def(
      "decode(Tensor q, Tensor k, Tensor v, Tensor? w, Tensor? beta, Tensor? g, Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? gate_sums, "
      "Tensor(d!)? carries, Tensor(e!)? open_keys, Tensor(f!)? open_carry, Tensor(g!) lengths, *, float? scale=None, bool gate_scaled=False) "
      "-> Tensor");
  m.def(
      "carried_keys(Tensor keys, Tensor values, Tensor? gate_sums, Tensor? carries, Tensor? open_keys, Tensor? open_carry, Tensor lengths, "
      "SymInt tokens) -> Tensor");
  m.def(
      "decoding_state(int sequences, int capacity, int query_heads, int key_heads, int key_width, int value_width, ScalarType dtype, bool has_w, "
      "bool has_gate, Device? device=None) -> Tensor[]",
      decoding_state);
}

std::tuple<at::Tensor, at::Tensor> path_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                                  const OptionalTensor& beta, const OptionalTensor& g, std::optional<double> scale,
                                                  const OptionalTensor& cu_seqlens, bool gate_scaled) {
  static const auto op = operators::dispatched<operators::PathAttentionSignature>("pathattn::path_attention");
  return op.call(q, k, v, in_compute_type(w, q), in_compute_type(beta, q), in_compute_type(g, q), scale, cu_seqlens, gate_scaled);
}

DecodingTensors DecodingTensors::create(int64_t sequences, int64_t capacity, int64_t query_heads, int64_t key_heads, int64_t key_width,
                                        int64_t value_width, at::ScalarType dtype, bool has_w, bool has_gate, at::Device device) {
  constexpr int64_t kMaxCapacity = int64_t{1} << 40;
  TORCH_CHECK_VALUE(sequences >= 0, "sequences must not be negative, got ", sequences);
  TORCH_CHECK_VALUE(capacity >= 0 && capacity <= kMaxCapacity, "capacity must be 0 ... ", kMaxCapacity, ", got ", capacity);
  TORCH_CHECK_VALUE(key_heads >= 1, "key_heads must be at least 1, got ", key_heads);
  TORCH_CHECK_VALUE(query_heads >= 1, "query_heads must be at least 1, got ", query_heads);
  TORCH_CHECK_VALUE(query_heads % key_heads == 0, "query_heads must be a multiple of key_heads (", key_heads, "), got ", query_heads);
  TORCH_CHECK_VALUE(key_width >= 1 && key_width <= kMaxHeadWidth, "key_width must be 1 ... ", kMaxHeadWidth, ", got ", key_width);
  TORCH_CHECK_VALUE(value_width >= 1 && value_width <= kMaxHeadWidth, "value_width must be 1 ... ", kMaxHeadWidth, ", got ", value_width);
  operators::check_kernel_type("dtype", dtype, device);
  const int64_t chunks = (capacity + kDecodeChunk - 1) / kDecodeChunk;
  const auto stored = at::TensorOptions(device).dtype(dtype), compute = at::TensorOptions(device).dtype(operators::compute_type(dtype));
  DecodingTensors state;
  state.keys = at::zeros({sequences, key_heads, chunks * kDecodeChunk, key_width}, stored);
  state.values = at::zeros({sequences, key_heads, chunks * kDecodeChunk, value_width}, stored);
  if (has_gate) state.gate_sums = at::zeros({sequences, query_heads, chunks * kDecodeChunk}, compute);
  if (has_w) {
    state.carries = at::zeros({sequences, key_heads, chunks, key_width, key_width}, compute);
    state.open_keys = at::zeros({sequences, key_heads, kDecodeChunk, key_width}, compute);
    state.open_carry = at::zeros({sequences, key_heads, 2, key_width, key_width}, compute);
  }
  state.lengths = at::zeros({sequences}, stored.dtype(at::kLong));
  return state;
}

at::Tensor prefill(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                   const OptionalTensor& g, std::optional<double> scale, const OptionalTensor& cu_seqlens, bool gate_scaled, DecodingTensors& state) {
  static const auto op = operators::dispatched<operators::PrefillSignature>("pathattn::prefill");
  const at::NoGradGuard no_gradient;
  return op.call(q, k, v, in_compute_type(w, q), in_compute_type(beta, q), in_compute_type(g, q), state.keys, state.values, optional(state.gate_sums),
                 optional(state.carries), optional(state.open_keys), optional(state.open_carry), state.lengths, scale, cu_seqlens, gate_scaled);
}

at::Tensor decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                  const OptionalTensor& g, std::optional<double> scale, bool gate_scaled, DecodingTensors& state) {
  static const auto op = operators::dispatched<operators::DecodeSignature>("pathattn::decode");
  const at::NoGradGuard no_gradient;
  return op.call(q, k, v, in_compute_type(w, q), in_compute_type(beta, q), in_compute_type(g, q), state.keys, state.values, optional(state.gate_sums),
                 optional(state.carries), optional(state.open_keys), optional(state.open_carry), state.lengths, scale, gate_scaled);
}

}  // namespace pathattn
