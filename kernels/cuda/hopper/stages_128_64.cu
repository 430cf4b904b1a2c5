#include "kernels/cuda/hopper/stages.cuh"

namespace pathattn::cuda::hopper {

template cudaError_t prepare_stages<128, 64>(const Call&, int64_t, cudaStream_t);
template cudaError_t attend_stage<128, 64>(const Call&, int64_t, int, cudaStream_t);

}  // namespace pathattn::cuda::hopper
