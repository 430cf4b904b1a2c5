// Checks a call and sends it to the path for it.

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/portable.h"
#if PATHATTN_HOPPER
#include "kernels/cuda/hopper/hopper.h"
#endif

namespace pathattn::cuda {
namespace {

Status check_problem(const Problem& problem) {
  if (problem.dtype == DType::kFloat64) return {"float64 is not supported on CUDA devices: use float32, bfloat16 or float16", 0};
  if (problem.cu_seqlens && problem.batch != 1) return {"cu_seqlens needs batch 1", problem.batch};
  if (problem.num_documents < 0) return {"the number of documents must not be negative", problem.num_documents};
  return {};
}

// The host must not read device offsets; float16 is for CUDA devices alone.
template <typename Arguments>
Status check_on_host(Arguments arguments) {
  if (Status status = check_problem(arguments.problem); !status.ok()) return status;
  arguments.problem.cu_seqlens = nullptr;
  arguments.problem.num_documents = 0;
  if (arguments.problem.dtype == DType::kFloat16) arguments.problem.dtype = DType::kBFloat16;
  return check(arguments);
}

}  // namespace

size_t forward_workspace_size(const ForwardArguments& arguments) {
  const bool has_w = arguments.w.data, has_gate = arguments.g.data;
#if PATHATTN_HOPPER
  if (hopper::supports(arguments)) return hopper::forward_workspace_size(arguments.problem, has_w, has_gate);
#endif
  return portable::forward_workspace_size(arguments.problem, has_w, has_gate);
}

size_t backward_workspace_size(const BackwardArguments& arguments) {
  const bool has_w = arguments.w.data, has_gate = arguments.g.data;
#if PATHATTN_HOPPER
  if (hopper::supports(arguments)) return hopper::backward_workspace_size(arguments.problem, has_w, has_gate);
#endif
  return portable::backward_workspace_size(arguments.problem, has_w, has_gate);
}

Status forward(const ForwardArguments& arguments, void* workspace, cudaStream_t stream) {
  if (Status status = check_on_host(arguments); !status.ok()) return status;
#if PATHATTN_HOPPER
  if (hopper::supports(arguments)) return hopper::forward(arguments, workspace, stream);
#endif
  return portable::forward(arguments, workspace, stream);
}

Status backward(const BackwardArguments& arguments, void* workspace, cudaStream_t stream) {
  if (Status status = check_on_host(arguments); !status.ok()) return status;
#if PATHATTN_HOPPER
  if (hopper::supports(arguments)) return hopper::backward(arguments, workspace, stream);
#endif
  return portable::backward(arguments, workspace, stream);
}

}  // namespace pathattn::cuda
