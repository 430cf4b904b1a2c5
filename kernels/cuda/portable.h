// The portable path: any arguments, any device from sm_80 on, in float32 arithmetic. The promises of cuda.h hold.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/problem.h"

namespace pathattn::cuda::portable {

// Heads are worked on in groups so that the workspace stays below this, unless a single head needs more.
inline constexpr size_t kWorkspaceCap = size_t{2} << 30;
size_t forward_workspace_size(const Problem& problem, bool has_w, bool has_gate);
size_t backward_workspace_size(const Problem& problem, bool has_w, bool has_gate);
// For arguments that have been checked.
Status forward(const ForwardArguments& arguments, void* workspace, cudaStream_t stream);
Status backward(const BackwardArguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace pathattn::cuda::portable
