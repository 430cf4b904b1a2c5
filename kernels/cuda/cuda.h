// PaTH attention on CUDA devices from sm_80 on, in float32 arithmetic: the portable path. docs/kernels.md explains the kernels.
// float32, bfloat16 and float16; any widths up to kMaxHeadWidth. Bit-identical from run to run: no atomics. Memory linear in the number of tokens.
// Calls enqueue work on `stream` and return: they neither allocate nor synchronise.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/problem.h"

namespace pathattn::cuda {

// Every pointer is a device pointer, problem.cu_seqlens too: its values are not checked (documents that are malformed give wrong numbers inside
// their own batch row, never an access outside it).
//
// Bytes of device scratch, 256-byte aligned; contents before and after mean nothing. Heads are worked on in groups so that it stays below
// kWorkspaceCap, unless a single head needs more.
inline constexpr size_t kWorkspaceCap = size_t{2} << 30;
size_t forward_workspace_size(const Problem& problem, bool has_w, bool has_gate);
size_t backward_workspace_size(const Problem& problem, bool has_w, bool has_gate);

Status forward(const ForwardArguments& arguments, void* workspace, cudaStream_t stream);
Status backward(const BackwardArguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace pathattn::cuda
