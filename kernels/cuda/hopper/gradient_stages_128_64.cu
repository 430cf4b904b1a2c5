#include "kernels/cuda/hopper/gradient_stages.cuh"

namespace pathattn::cuda::hopper {

template cudaError_t gradient_stages<128, 64>(const Call&, const Gradients&, int64_t, cudaStream_t);

}  // namespace pathattn::cuda::hopper
