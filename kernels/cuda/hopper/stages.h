// The stages of a Hopper call whose code depends on the head widths. Each pair of widths is compiled in a file of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pathattn::cuda::hopper {

struct Call;

// For `num_units` key heads of batch rows and at most call.max_tiles tiles a row: everything from the inputs to o and lse.
template <int K, int V>
cudaError_t forward_stages(const Call& call, int64_t num_units, int num_multiprocessors, cudaStream_t stream);

}  // namespace pathattn::cuda::hopper
