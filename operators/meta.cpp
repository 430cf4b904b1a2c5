// The operators on fake tensors: the same checks and the same outputs' sizes, without values. Sizes may be symbolic.
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "operators/arguments.h"

namespace pathattn::operators {
namespace {

std::tuple<at::Tensor, at::Tensor> path_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                                  const OptionalTensor& beta, const OptionalTensor& g, std::optional<double> scale,
                                                  const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const Inputs inputs{q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled};
  check_inputs(inputs);
  return {new_o(inputs), new_lse(inputs)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> path_attention_with_rest(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                        const OptionalTensor& w, const OptionalTensor& beta, const OptionalTensor& g,
                                                                        std::optional<double> scale, const OptionalTensor& cu_seqlens,
                                                                        bool gate_scaled) {
  const auto [o, lse] = path_attention(q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled);
  return {o, lse, at::empty_like(o)};
}

Gradients path_attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                                  const OptionalTensor& g, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o,
                                  const OptionalTensor& d_lse, std::optional<double> scale, const OptionalTensor& cu_seqlens, bool gate_scaled,
                                  const OptionalTensor& o_rest) {
  const Inputs inputs{q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled};
  check_inputs(inputs);
  check_results(inputs, o, lse, d_o, d_lse, o_rest);
  return {new_gradient(inputs, q), new_gradient(inputs, k),    new_gradient(inputs, v),
          new_gradient(inputs, w), new_gradient(inputs, beta), new_gradient(inputs, g)};
}

at::Tensor prefill(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                   const OptionalTensor& g, at::Tensor& keys, at::Tensor& values, const OptionalTensor& gate_sums, const OptionalTensor& carries,
                   const OptionalTensor& open_keys, const OptionalTensor& open_carry, at::Tensor& lengths, std::optional<double> scale,
                   const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const Inputs inputs{q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled};
  check_inputs(inputs);
  check_state({keys, values, gate_sums, carries, open_keys, open_carry, lengths}, inputs);
  return new_o(inputs);
}

at::Tensor decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                  const OptionalTensor& g, at::Tensor& keys, at::Tensor& values, const OptionalTensor& gate_sums, const OptionalTensor& carries,
                  const OptionalTensor& open_keys, const OptionalTensor& open_carry, at::Tensor& lengths, std::optional<double> scale,
                  bool gate_scaled) {
  const OptionalTensor no_cu_seqlens;
  const Inputs inputs{q, k, v, w, beta, g, scale, no_cu_seqlens, gate_scaled};
  check_inputs(inputs);
  check_state({keys, values, gate_sums, carries, open_keys, open_carry, lengths}, inputs);
  return new_o(inputs);
}

at::Tensor carried_keys(const at::Tensor& keys, const at::Tensor& values, const OptionalTensor& gate_sums, const OptionalTensor& carries,
                        const OptionalTensor& open_keys, const OptionalTensor& open_carry, const at::Tensor& lengths, c10::SymInt tokens) {
  const State state{keys, values, gate_sums, carries, open_keys, open_carry, lengths};
  check_state(state);
  check_tokens(state, tokens);
  return new_carried_keys(state, tokens);
}

std::tuple<at::Tensor, at::Tensor> stick_breaking_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                            std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  const Inputs inputs = stick_breaking_inputs(q, k, v, scale, cu_seqlens);
  check_inputs(inputs);
  return {new_o(inputs), new_lse(inputs)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> stick_breaking_attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                                 const at::Tensor& d_o, const OptionalTensor& d_rest,
                                                                                 std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  const Inputs inputs = stick_breaking_inputs(q, k, v, scale, cu_seqlens);
  check_inputs(inputs);
  check_stick_breaking_gradients(inputs, d_o, d_rest);
  return {new_gradient(inputs, q), new_gradient(inputs, k), new_gradient(inputs, v)};
}

}  // namespace

TORCH_LIBRARY_IMPL(pathattn, Meta, m) {
  m.impl("path_attention", path_attention);
  m.impl("path_attention_with_rest", path_attention_with_rest);
  m.impl("path_attention_backward", path_attention_backward);
  m.impl("prefill", prefill);
  m.impl("decode", decode);
  m.impl("carried_keys", carried_keys);
  m.impl("stick_breaking_attention", stick_breaking_attention);
  m.impl("stick_breaking_attention_backward", stick_breaking_attention_backward);
}

}  // namespace pathattn::operators
