#include "kernels/cuda/stages.cuh"

namespace pathattn::cuda {
template cudaError_t prepare_stages<128>(const Call&, int64_t, int64_t, cudaStream_t);
template cudaError_t attend_stages<128>(const Call&, int64_t, int64_t, cudaStream_t);
template cudaError_t gradient_stages<128>(const Call&, int64_t, int64_t, cudaStream_t);
}  // namespace pathattn::cuda
