// Checks a call and sends it to the path for it.

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/portable.h"
#if PATHATTN_HOPPER
#include "kernels/cuda/hopper/hopper.h"
#endif

namespace pathattn::cuda {
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
