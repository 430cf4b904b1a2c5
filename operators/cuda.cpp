// The operators on CUDA devices: kernels/cuda on the device's current stream, with workspaces from torch's allocator. Nothing waits for the device.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/decode.h"
#include "kernels/cuda/stick_breaking.h"
#include "operators/arguments.h"

namespace pathattn::operators {
namespace {

// Offsets on the device as int64. From the host they go by way of pinned memory, which torch keeps until the copy is done. Those on the device are
// taken as they are, since looking at them would mean to wait (kernels/cuda/cuda.h says what malformed ones do).
at::Tensor offsets_on_device(const Inputs& in) {
  if (!in.cu_seqlens || !in.cu_seqlens->defined()) return {};
  const at::Tensor offsets = in.cu_seqlens->to(at::kLong).contiguous();
  if (offsets.is_cuda()) return offsets;
  TORCH_CHECK_VALUE(c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None, "cu_seqlens must be on ", in.q.device(),
                    " while a CUDA graph is captured, got a tensor on ", offsets.device());
  return offsets.pin_memory().to(in.q.device(), at::kLong, /*non_blocking=*/true);
}

// The workspace goes back to the allocator while the kernels still run: only work queued after them on this stream can be given it.
template <typename Kernel>
void run(const KernelInputs& in, size_t workspace_size, Kernel&& kernel) {
  const at::Tensor workspace = at::empty({static_cast<int64_t>(workspace_size)}, in.q.options().dtype(at::kByte));
  check_status(kernel(workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream(in.q.device().index()).stream()));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend(const Inputs& inputs, bool with_rest) {
  check_inputs(inputs);
  check_documents(inputs);
  const c10::cuda::CUDAGuard guard(inputs.q.device());
  const KernelInputs in(inputs, offsets_on_device(inputs));
  const at::Tensor o = new_o(inputs), lse = new_lse(inputs), o_rest = with_rest ? new_o(inputs) : at::Tensor();
  const ForwardArguments arguments = forward_arguments(in, o, lse, o_rest);
  run(in, cuda::forward_workspace_size(arguments), [&](void* workspace, cudaStream_t stream) { return cuda::forward(arguments, workspace, stream); });
  return {o, lse, o_rest};
}

std::tuple<at::Tensor, at::Tensor> path_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                                  const OptionalTensor& beta, const OptionalTensor& g, std::optional<double> scale,
                                                  const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const auto [o, lse, no_rest] = attend({q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled}, false);
  return {o, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> path_attention_with_rest(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                        const OptionalTensor& w, const OptionalTensor& beta, const OptionalTensor& g,
                                                                        std::optional<double> scale, const OptionalTensor& cu_seqlens,
                                                                        bool gate_scaled) {
  return attend({q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled}, true);
}

Gradients path_attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                                  const OptionalTensor& g, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o,
                                  const OptionalTensor& d_lse, std::optional<double> scale, const OptionalTensor& cu_seqlens, bool gate_scaled,
                                  const OptionalTensor& o_rest) {
  const Inputs inputs{q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled};
  check_inputs(inputs);
  check_results(inputs, o, lse, d_o, d_lse, o_rest);
  check_documents(inputs);
  const c10::cuda::CUDAGuard guard(q.device());
  const KernelInputs in(inputs, offsets_on_device(inputs));
  const BackwardTensors tensors(inputs, o, lse, d_o, d_lse, o_rest);
  const BackwardArguments arguments = tensors.arguments(in);
  run(in, cuda::backward_workspace_size(arguments),
      [&](void* workspace, cudaStream_t stream) { return cuda::backward(arguments, workspace, stream); });
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
  check_documents(inputs);
  const c10::cuda::CUDAGuard guard(q.device());
  const KernelInputs in(inputs, offsets_on_device(inputs));
  const DecodingState state = kernel_state(tensors, in.problem.query_heads);
  const at::Tensor o = new_o(inputs), lse = new_lse(inputs);
  const ForwardArguments arguments = forward_arguments(in, o, lse);
  run(in, cuda::forward_workspace_size(arguments), [&](void* workspace, cudaStream_t stream) {
    const Status status = cuda::forward(arguments, workspace, stream);
    return status.ok() ? cuda::fill_state(arguments, state, stream) : status;
  });
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
  const c10::cuda::CUDAGuard guard(q.device());
  const KernelInputs in(inputs);
  const at::Tensor o = new_o(inputs);
  const DecodingState state = kernel_state(tensors, in.problem.query_heads);
  run(in, 0, [&](void*, cudaStream_t stream) { return cuda::decode(forward_arguments(in, o), state, stream); });
  return o;
}

at::Tensor carried_keys(const at::Tensor& keys, const at::Tensor& values, const OptionalTensor& gate_sums, const OptionalTensor& carries,
                        const OptionalTensor& open_keys, const OptionalTensor& open_carry, const at::Tensor& lengths, int64_t tokens) {
  const State tensors{keys, values, gate_sums, carries, open_keys, open_carry, lengths};
  check_state(tensors);
  check_tokens(tensors, tokens);
  const c10::cuda::CUDAGuard guard(keys.device());
  const at::Tensor out = new_carried_keys(tensors, tokens);
  check_status(cuda::carried_keys(kernel_state(tensors), tokens, view(out), c10::cuda::getCurrentCUDAStream(keys.device().index()).stream()));
  return out;
}

std::tuple<at::Tensor, at::Tensor> stick_breaking_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                            std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  const Inputs inputs = stick_breaking_inputs(q, k, v, scale, cu_seqlens);
  check_inputs(inputs);
  check_documents(inputs);
  const c10::cuda::CUDAGuard guard(q.device());
  const KernelInputs in(inputs, offsets_on_device(inputs));
  const at::Tensor o = new_o(inputs), rest = new_lse(inputs);
  const StickBreakingForwardArguments arguments = stick_breaking_arguments(in, o, rest);
  run(in, cuda::stick_breaking_forward_workspace_size(in.problem),
      [&](void* workspace, cudaStream_t stream) { return cuda::stick_breaking_forward(arguments, workspace, stream); });
  return {o, rest};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> stick_breaking_attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                                 const at::Tensor& d_o, const OptionalTensor& d_rest,
                                                                                 std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  const Inputs inputs = stick_breaking_inputs(q, k, v, scale, cu_seqlens);
  check_inputs(inputs);
  check_stick_breaking_gradients(inputs, d_o, d_rest);
  check_documents(inputs);
  const c10::cuda::CUDAGuard guard(q.device());
  const KernelInputs in(inputs, offsets_on_device(inputs));
  const StickBreakingBackwardTensors tensors(inputs, d_o, d_rest);
  const StickBreakingBackwardArguments arguments = tensors.arguments(in);
  run(in, cuda::stick_breaking_backward_workspace_size(in.problem),
      [&](void* workspace, cudaStream_t stream) { return cuda::stick_breaking_backward(arguments, workspace, stream); });
  return {tensors.dq, tensors.dk, tensors.dv};
}

}  // namespace

TORCH_LIBRARY_IMPL(pathattn, CUDA, m) {
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
