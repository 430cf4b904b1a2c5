// The operators on a CPU: kernels/cpu on at::parallel_for, with workspaces from torch's allocator.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

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
// before they overflow (docs/numerics.md). Looked at before anything is written. Inputs' own NaNs pass.
void check_growth(const KernelInputs& in) {
  constexpr double kMostInTile = 10, kMostInAll = 100;  // base-2 logarithms
  constexpr int64_t kTile = 64;
  if (!in.w.defined() || in.w.numel() == 0) return;
  const at::Tensor strength = at::linalg_vector_norm(in.w, 2, at::IntArrayRef{-1}).square_().mul_(in.beta);
  const at::Tensor growth = (strength - 1).abs_().sub_(0x1p-7).clamp_min_(1).log2_().cumsum(1);
  double in_tile = growth.slice(1, 0, kTile).amax().item<double>();
  if (growth.size(1) > kTile) in_tile = std::max(in_tile, (growth.slice(1, kTile) - growth.slice(1, 0, -kTile)).amax().item<double>());
  TORCH_CHECK_VALUE(!(in_tile > kMostInTile || growth.amax().item<double>() > kMostInAll),
                    "beta * |w|^2 must stay within 0 ... 2 but for a few tokens (normalise w), got values from ", strength.amin().item<double>(),
                    " to ", strength.amax().item<double>());
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
  check_growth(in);
  at::Tensor o = new_o(inputs), lse = new_lse(inputs);
  const ForwardArguments arguments = forward_arguments(in, o, lse);
  check_status(check(arguments));  // before anything is measured by cu_seqlens
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
  check_growth(in);
  at::Tensor o = new_o(inputs), lse = new_lse(inputs);
  const ForwardArguments arguments = forward_arguments(in, o, lse);
  check_status(check(arguments));  // before anything is measured by cu_seqlens
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
  check_growth(in);
  at::Tensor o = new_o(inputs);
  const ForwardArguments arguments = forward_arguments(in, o);
  const int workers = available_workers();
  run(workers, cpu::decode_workspace_size(in.problem, state, workers),
      [&](void* workspace, const Executor& executor) { return cpu::decode(arguments, state, workspace, executor); });
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
