// The operators on CUDA devices: kernels/cuda on the device's current stream, with workspaces from torch's allocator. Nothing waits for the device.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "kernels/cuda/cuda.h"
#include "operators/arguments.h"

namespace pathattn::operators {
namespace {

// Offsets on the device as int64. Those on the host are checked first and go by way of pinned memory, which torch keeps until the copy is done;
// those on the device are taken as they are, since looking at them would mean to wait (kernels/cuda/cuda.h says what malformed ones do).
at::Tensor offsets_on_device(const Inputs& in) {
  if (!in.cu_seqlens || !in.cu_seqlens->defined()) return {};
  if (in.cu_seqlens->is_cuda()) {
    TORCH_CHECK_VALUE(in.cu_seqlens->numel() > 1 || in.q.size(1) == 0, "cu_seqlens must name at least one document for ", in.q.size(1),
                      " tokens, got one entry");
    return in.cu_seqlens->to(at::kLong).contiguous();
  }
  TORCH_CHECK_VALUE(c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None, "cu_seqlens must be on ", in.q.device(),
                    " while a CUDA graph is captured, got a tensor on ", in.cu_seqlens->device());
  const KernelInputs on_host(in);
  check_status(check(on_host.problem));
  return on_host.cu_seqlens.pin_memory().to(in.q.device(), at::kLong, /*non_blocking=*/true);
}

// The workspace goes back to the allocator while the kernels still run: only work queued after them on this stream can be given it.
template <typename Kernel>
void run(const KernelInputs& in, size_t workspace_size, Kernel&& kernel) {
  const at::Tensor workspace = at::empty({static_cast<int64_t>(workspace_size)}, in.q.options().dtype(at::kByte));
  check_status(kernel(workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream(in.q.device().index()).stream()));
}

std::tuple<at::Tensor, at::Tensor> path_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                                  const OptionalTensor& beta, const OptionalTensor& g, std::optional<double> scale,
                                                  const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const Inputs inputs{q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled};
  check_inputs(inputs);
  const c10::cuda::CUDAGuard guard(q.device());
  const KernelInputs in(inputs, offsets_on_device(inputs));
  const at::Tensor o = new_o(inputs), lse = new_lse(inputs);
  run(in, cuda::forward_workspace_size(in.problem, in.w.defined(), in.g.defined()),
      [&](void* workspace, cudaStream_t stream) { return cuda::forward(forward_arguments(in, o, lse), workspace, stream); });
  return {o, lse};
}

Gradients path_attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                                  const OptionalTensor& g, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o,
                                  const OptionalTensor& d_lse, std::optional<double> scale, const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const Inputs inputs{q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled};
  check_inputs(inputs);
  check_results(inputs, o, lse, d_o, d_lse);
  const c10::cuda::CUDAGuard guard(q.device());
  const KernelInputs in(inputs, offsets_on_device(inputs));
  const BackwardTensors tensors(inputs, o, lse, d_o, d_lse);
  run(in, cuda::backward_workspace_size(in.problem, in.w.defined(), in.g.defined()),
      [&](void* workspace, cudaStream_t stream) { return cuda::backward(tensors.arguments(in), workspace, stream); });
  return {tensors.dq, tensors.dk, tensors.dv, tensors.dw, tensors.dbeta, tensors.dg};
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              " runs on CPUs alone: move its tensors to the CPU, or call pathattn::path_attention over all tokens so far");
}

}  // namespace

TORCH_LIBRARY_IMPL(pathattn, CUDA, m) {
  m.impl("path_attention", path_attention);
  m.impl("path_attention_backward", path_attention_backward);
  for (const char* name : {"prefill", "decode", "carried_keys"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

}  // namespace pathattn::operators
