// Definitions of stages.h, instantiated by stages_*.cu.
#pragma once

#include "kernels/cuda/hopper/attend.cuh"
#include "kernels/cuda/hopper/carry.cuh"
#include "kernels/cuda/hopper/local.cuh"
#include "kernels/cuda/hopper/stages.h"

namespace pathattn::cuda::hopper {

// Launches kernels one after another and keeps the first error.
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

template <int K, int V>
cudaError_t forward_stages(const Call& call, int64_t num_units, int num_multiprocessors, cudaStream_t stream) {
  Launcher launcher(stream);
  const bool has_w = call.w.data, has_gate = call.g.data;
  const dim3 tiles(static_cast<unsigned>(call.max_tiles), static_cast<unsigned>(num_units));
  launcher.launch(has_w ? attend_locally<K, V, true> : attend_locally<K, V, false>, dim3(tiles.x * tiles.y), kLocalThreads, LocalMemory<K, V>::kTotal,
                  call, static_cast<int>(num_units));
  for (int level = 0; has_w && level + 1 < call.num_levels; ++level) {
    launcher.launch(multiply_matrices<K>, tiles, 2 * K, (kRadix - 1) * kMatrixBytes<K>, call, level);
    launcher.launch(carry_keys<K>, tiles, kCarryThreads, kMatrixBytes<K> + kImageBytes<K>, call, level);
  }
  const auto kernel =
      has_w ? (has_gate ? attend<K, V, true, true> : attend<K, V, true, false>) : (has_gate ? attend<K, V, false, true> : attend<K, V, false, false>);
  launcher.launch(kernel, dim3(num_multiprocessors), kAttendThreads, AttendMemory<K, V>::kTotal, call, static_cast<int>(num_units * call.group));
  return launcher.error();
}

}  // namespace pathattn::cuda::hopper
