// The operators on a CPU: kernels/cpu on at::parallel_for, with workspaces from torch's allocator.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/stick_breaking.h"
#include "operators/arguments.h"

namespace pathattn::operators {
namespace {

int available_workers() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// Runs a kernel with its workspace; turns its Status into an error. Tasks go in order to whichever worker is free, since those of causal attention
// differ in length; inside another parallel region everything happens on the calling thread.
template <typename Kernel>
void run(int num_workers, size_t workspace_size, Kernel&& kernel) {
  const at::Tensor workspace = at::empty({static_cast<int64_t>(workspace_size)}, at::kByte);
  auto parallel_for = [=](int64_t num_tasks, Executor::Task task) {
    std::atomic<int64_t> next{0};
    at::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) {
        for (int64_t i = next++; i < num_tasks; i = next++) task(i, static_cast<int>(worker));
      }
    });
  };
  check_status(kernel(workspace.mutable_data_ptr(), Executor{num_workers, parallel_for}));
}

// Factors that lengthen vectors: a tile's keys go through all of its factors, so that errors grow with their product, and results would be wrong long
// before they overflow (docs/numerics.md). Looked at before anything is written. A document's first factor meets no key. Inputs' own NaNs pass.
// lengths [B]: of the sequences that the tokens continue; undefined where documents begin.
void check_growth(const KernelInputs& in, const at::Tensor& lengths = {}) {
  constexpr double kRounding = 0x1p-7, kMostInTile = 10, kMostInAll = 100;  // the limits are base-2 logarithms
  constexpr int64_t kTile = 64;
  if (!in.w.defined() || in.w.numel() == 0) return;
  const at::Tensor square = at::linalg_vector_norm(in.w, 2, at::IntArrayRef{-1}).square_(), strength = square * in.beta;  // [B, T, H]
  if ((strength - 1).abs_().amax().item<double>() <= 1 + kRounding) return;

  strength.masked_fill_(square.isinf(), INFINITY).nan_to_num_(1, INFINITY, -INFINITY);  // kernels cannot compute with such a w, even where beta is 0
  const int64_t tokens = in.w.size(1);
  const at::Tensor start_T = in.cu_seqlens.defined() ? at::repeat_interleave(in.cu_seqlens.slice(0, 0, -1), in.cu_seqlens.diff())
                                                     : at::zeros({tokens}, at::kLong);  // of each token's document
  const at::Tensor first_T1 = start_T.eq(at::arange(tokens)).unsqueeze(-1);
  const at::Tensor growth = (strength - 1).abs_().sub_(kRounding).clamp_min_(1).log2_().clamp_max_(2 * kMostInAll).to(at::kDouble);
  growth.masked_fill_(lengths.defined() ? first_T1.logical_and(lengths.eq(0).view({-1, 1, 1})) : first_T1, 0);
  const at::Tensor before = at::constant_pad_nd(growth, {0, 0, 1, 0}).cumsum(1);  // [B, 1 + T, H]
  const auto most_since = [&](const at::Tensor& since_T) { return (before.slice(1, 1) - before.index_select(1, since_T)).amax().item<double>(); };
  TORCH_CHECK_VALUE(most_since(start_T) <= kMostInAll && most_since(start_T.maximum(at::arange(1 - kTile, tokens + 1 - kTile))) <= kMostInTile,
                    "beta * |w|^2 must stay within 0 ... 2 but for a few tokens, and |w|^2 be finite (normalise w), got values from ",
                    strength.amin().item<double>(), " to ", strength.amax().item<double>());
}

// Growth over many calls shows when it has left the format's range.
void check_decoded(const KernelInputs& in, const at::Tensor& o) {
  if (!in.w.defined() || std::isfinite(o.sum(at::kDouble).item<double>())) return;
  const auto finite_B = [](const at::Tensor& tensor) { return tensor.isfinite().flatten(1).all(1); };
  at::Tensor overflown_B = finite_B(o).logical_not_();
  for (const at::Tensor& input : {in.q, in.k, in.v, in.w, in.beta}) overflown_B.logical_and_(finite_B(input));
  if (in.g.defined()) overflown_B.logical_and_(in.g.isnan().flatten(1).any(1).logical_not_());
  TORCH_CHECK_VALUE(
      !overflown_B.any().item<bool>(),
      "o is not finite though this call's inputs are: beta * |w|^2 must stay within 0 ... 2 but for a few tokens (normalise w), and the "
      "inputs of earlier tokens must be finite too; the decoding state is spoilt, begin a new one");
}

void check_lengths(const DecodingState& state) {
  for (int64_t n = 0; n < state.sequences; ++n) {
    TORCH_CHECK_VALUE(state.lengths[n] >= 0 && state.lengths[n] <= state.capacity, "lengths of the decoding state must be 0 ... ", state.capacity,
                      ", got ", state.lengths[n]);
  }
}

std::tuple<at::Tensor, at::Tensor> path_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                                  const OptionalTensor& beta, const OptionalTensor& g, std::optional<double> scale,
                                                  const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const Inputs inputs{q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled};
  check_inputs(inputs);
  const KernelInputs in(inputs);
  at::Tensor o = new_o(inputs), lse = new_lse(inputs);
  const ForwardArguments arguments = forward_arguments(in, o, lse);
  check_status(check(arguments));  // before anything is measured by cu_seqlens
  check_growth(in);
  const int workers = available_workers();
  run(workers, cpu::forward_workspace_size(in.problem, in.w.defined(), workers),
      [&](void* workspace, const Executor& executor) { return cpu::forward(arguments, workspace, executor); });
  return {o, lse};
}

Gradients path_attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                                  const OptionalTensor& g, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o,
                                  const OptionalTensor& d_lse, std::optional<double> scale, const OptionalTensor& cu_seqlens, bool gate_scaled,
                                  const OptionalTensor& o_rest) {
  const Inputs inputs{q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled};
  check_inputs(inputs);
  check_results(inputs, o, lse, d_o, d_lse, o_rest);
  const KernelInputs in(inputs);
  const BackwardTensors tensors(inputs, o, lse, d_o, d_lse, o_rest);
  const BackwardArguments arguments = tensors.arguments(in);
  check_status(check(arguments));  // before anything is measured by cu_seqlens
  const int workers = available_workers();
  run(workers, cpu::backward_workspace_size(in.problem, in.w.defined(), workers),
      [&](void* workspace, const Executor& executor) { return cpu::backward(arguments, workspace, executor); });
  return {tensors.dq, tensors.dk, tensors.dv, tensors.dw, tensors.dbeta, tensors.dg};
}

at::Tensor prefill(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                   const OptionalTensor& g, at::Tensor& keys, at::Tensor& values, const OptionalTensor& gate_sums, const OptionalTensor& carries,
                   const OptionalTensor& open_keys, const OptionalTensor& open_carry, at::Tensor& lengths, std::optional<double> scale,
                   const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const Inputs inputs{q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled};
  const State tensors{keys, values, gate_sums, carries, open_keys, open_carry, lengths};
  check_inputs(inputs);
  check_state(tensors, inputs);
  const KernelInputs in(inputs);
  const DecodingState state = kernel_state(tensors, in.problem.query_heads);
  check_lengths(state);
  at::Tensor o = new_o(inputs), lse = new_lse(inputs);
  const ForwardArguments arguments = forward_arguments(in, o, lse);
  check_status(check(arguments));  // before anything is measured by cu_seqlens
  check_growth(in);
  const int workers = available_workers();
  run(workers, cpu::prefill_workspace_size(in.problem, in.w.defined(), workers),
      [&](void* workspace, const Executor& executor) { return cpu::prefill(arguments, state, workspace, executor); });
  return o;
}

at::Tensor decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                  const OptionalTensor& g, at::Tensor& keys, at::Tensor& values, const OptionalTensor& gate_sums, const OptionalTensor& carries,
                  const OptionalTensor& open_keys, const OptionalTensor& open_carry, at::Tensor& lengths, std::optional<double> scale,
                  bool gate_scaled) {
  const OptionalTensor no_cu_seqlens;
  const Inputs inputs{q, k, v, w, beta, g, scale, no_cu_seqlens, gate_scaled};
  const State tensors{keys, values, gate_sums, carries, open_keys, open_carry, lengths};
  check_inputs(inputs);
  check_state(tensors, inputs);
  const KernelInputs in(inputs);
  const DecodingState state = kernel_state(tensors, in.problem.query_heads);
  check_lengths(state);
  check_growth(in, lengths);
  at::Tensor o = new_o(inputs);
  const ForwardArguments arguments = forward_arguments(in, o);
  const int workers = available_workers();
  run(workers, cpu::decode_workspace_size(in.problem, state, workers),
      [&](void* workspace, const Executor& executor) { return cpu::decode(arguments, state, workspace, executor); });
  check_decoded(in, o);
  return o;
}

at::Tensor carried_keys(const at::Tensor& keys, const at::Tensor& values, const OptionalTensor& gate_sums, const OptionalTensor& carries,
                        const OptionalTensor& open_keys, const OptionalTensor& open_carry, const at::Tensor& lengths, int64_t tokens) {
  const State tensors{keys, values, gate_sums, carries, open_keys, open_carry, lengths};
  check_state(tensors);
  check_tokens(tensors, tokens);
  const DecodingState state = kernel_state(tensors);
  check_lengths(state);
  at::Tensor out = new_carried_keys(tensors, tokens);
  if (out.numel() == 0) return out;
  const int workers = available_workers();
  run(workers, cpu::carried_keys_workspace_size(state, workers),
      [&](void* workspace, const Executor& executor) { return cpu::carried_keys(state, tokens, view(out), workspace, executor); });
  return out;
}

std::tuple<at::Tensor, at::Tensor> stick_breaking_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                            std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  const Inputs inputs = stick_breaking_inputs(q, k, v, scale, cu_seqlens);
  check_inputs(inputs);
  const KernelInputs in(inputs);
  const at::Tensor o = new_o(inputs), rest = new_lse(inputs);
  const StickBreakingForwardArguments arguments = stick_breaking_arguments(in, o, rest);
  check_status(check(arguments));  // before anything is measured by cu_seqlens
  const int workers = available_workers();
  run(workers, cpu::stick_breaking_forward_workspace_size(in.problem, workers),
      [&](void* workspace, const Executor& executor) { return cpu::stick_breaking_forward(arguments, workspace, executor); });
  return {o, rest};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> stick_breaking_attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                                 const at::Tensor& d_o, const OptionalTensor& d_rest,
                                                                                 std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  const Inputs inputs = stick_breaking_inputs(q, k, v, scale, cu_seqlens);
  check_inputs(inputs);
  check_stick_breaking_gradients(inputs, d_o, d_rest);
  const KernelInputs in(inputs);
  const StickBreakingBackwardTensors tensors(inputs, d_o, d_rest);
  const StickBreakingBackwardArguments arguments = tensors.arguments(in);
  check_status(check(arguments));  // before anything is measured by cu_seqlens
  const int workers = available_workers();
  run(workers, cpu::stick_breaking_backward_workspace_size(in.problem, workers),
      [&](void* workspace, const Executor& executor) { return cpu::stick_breaking_backward(arguments, workspace, executor); });
  return {tensors.dq, tensors.dk, tensors.dv};
}

}  // namespace

TORCH_LIBRARY_IMPL(pathattn, CPU, m) {
  m.impl("path_attention", path_attention);
  m.impl("path_attention_backward", path_attention_backward);
  m.impl("prefill", prefill);
  m.impl("decode", decode);
  m.impl("carried_keys", carried_keys);
  m.impl("stick_breaking_attention", stick_breaking_attention);
  m.impl("stick_breaking_attention_backward", stick_breaking_attention_backward);
}

}  // namespace pathattn::operators
