// Launches kernels one after another and keeps the first error.
#pragma once

#include <cuda_runtime.h>

namespace pathattn::cuda::hopper {

class Launcher {
 public:
  explicit Launcher(cudaStream_t stream) : stream_(stream) {}
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, Arguments... arguments) {
    if (error_ != cudaSuccess) return;
    error_ = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error_ != cudaSuccess) return;
    kernel<<<grid, threads, shared_bytes, stream_>>>(arguments...);
    error_ = cudaGetLastError();
  }
  cudaError_t error() const { return error_; }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace pathattn::cuda::hopper
