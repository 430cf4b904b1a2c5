// The stages of a Hopper call whose code depends on the head widths. Each pair of widths is compiled in files of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pathattn::cuda::hopper {

struct Call;
struct Gradients;

// Each for `num_units` key heads of batch rows and at most call.max_tiles tiles a row.
template <int K, int V>
cudaError_t prepare_stages(const Call& call, int64_t num_units, cudaStream_t stream);  // inside tiles, and all levels of nodes
template <int K, int V>
cudaError_t attend_stage(const Call& call, int64_t num_units, int num_multiprocessors, cudaStream_t stream);  // then o and lse,
template <int K, int V>
cudaError_t gradient_stages(const Call& call, const Gradients& gradients, int64_t num_units, cudaStream_t stream);  // or gradients, but the gate's

}  // namespace pathattn::cuda::hopper
