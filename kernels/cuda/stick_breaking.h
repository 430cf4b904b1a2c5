// Stick-breaking attention on CUDA devices from sm_80 on. docs/kernels.md explains the kernels. The promises of cuda.h hold: bit-identical from run
// to run, memory linear in the number of tokens, any widths, no allocation and no synchronisation; every pointer is a device pointer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/stick_breaking.h"

namespace pathattn::cuda {

// Bytes of device scratch, 256-byte aligned; contents before and after mean nothing.
size_t stick_breaking_forward_workspace_size(const Problem& problem);
size_t stick_breaking_backward_workspace_size(const Problem& problem);
Status stick_breaking_forward(const StickBreakingForwardArguments& arguments, void* workspace, cudaStream_t stream);
Status stick_breaking_backward(const StickBreakingBackwardArguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace pathattn::cuda
