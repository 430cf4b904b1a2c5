#include "kernels/cuda/hopper/stages.cuh"

namespace pathattn::cuda::hopper {

template cudaError_t forward_stages<64, 128>(const Call&, int64_t, int, cudaStream_t);

}  // namespace pathattn::cuda::hopper
