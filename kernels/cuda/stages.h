// The stages of a call whose code depends on the padded head width D (64, 128 or 256). Each D is compiled in a file of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pathattn::cuda {

struct Call;

// Each launches its kernels for `num_units` key heads of batch rows and at most `max_tiles` tiles a row.
template <int D>
cudaError_t prepare_stages(const Call& call, int64_t max_tiles, int64_t num_units, cudaStream_t stream);  // with w: what the other two read
template <int D>
cudaError_t attend_stages(const Call& call, int64_t max_tiles, int64_t num_units, cudaStream_t stream);  // out and lse
template <int D>
cudaError_t gradient_stages(const Call& call, int64_t max_tiles, int64_t num_units, cudaStream_t stream);

}  // namespace pathattn::cuda
