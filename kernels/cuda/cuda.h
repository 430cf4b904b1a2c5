// PaTH attention on CUDA devices from sm_80 on. docs/kernels.md explains the kernels.
// float32, bfloat16 and float16; any widths up to kMaxHeadWidth. Bit-identical from run to run: no floating-point atomics. Memory linear in the
// number of tokens. Calls enqueue work on `stream` and return: they neither allocate nor synchronise.
//
// Every pointer is a device pointer, problem.cu_seqlens too: its values are not checked (documents that are malformed give wrong numbers inside
// their own batch row, never an access outside it).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/problem.h"

namespace pathattn::cuda {

// Each takes the Hopper path (hopper/hopper.h) where that supports the arguments on the current device, else the portable one (portable.h).
// Workspaces are bytes of device scratch, 256-byte aligned; contents before and after mean nothing.
size_t forward_workspace_size(const ForwardArguments& arguments);
size_t backward_workspace_size(const BackwardArguments& arguments);
Status forward(const ForwardArguments& arguments, void* workspace, cudaStream_t stream);
Status backward(const BackwardArguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace pathattn::cuda
