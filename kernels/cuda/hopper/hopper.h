// PaTH attention on Hopper GPUs (compute capability 9.0) with their own matrix instructions: bfloat16 and float16, widths 64 and 128.
// docs/hopper-kernels.md explains the kernels; cuda.h's promises hold here too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/problem.h"

namespace pathattn::cuda::hopper {

// Whether the current device, the widths, the format and the alignment of these tensors (16 bytes for each row; 4 for forward's o) are what the
// kernels are made for.
bool supports(const ForwardArguments& arguments);
bool supports(const BackwardArguments& arguments);

inline constexpr size_t kWorkspaceCap = size_t{1} << 30;  // unless a single head needs more
size_t forward_workspace_size(const Problem& problem, bool has_w, bool has_gate);
size_t backward_workspace_size(const Problem& problem, bool has_w, bool has_gate);
Status forward(const ForwardArguments& arguments, void* workspace, cudaStream_t stream);
Status backward(const BackwardArguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace pathattn::cuda::hopper
