// Definitions of stages.h, instantiated by stages_64.cu, stages_128.cu and stages_256.cu.
#pragma once

#include "kernels/cuda/adjoint.cuh"
#include "kernels/cuda/stages.h"

namespace pathattn::cuda {

// Launches stages one after another and keeps the first error.
class Launcher {
 public:
  explicit Launcher(cudaStream_t stream) : stream_(stream) {}

  void launch(void (*kernel)(Call), int64_t grid_x, int64_t grid_y, int shared_floats, const Call& call) {
    if (error_ != cudaSuccess) return;
    const int bytes = shared_floats * static_cast<int>(sizeof(float));
    error_ = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error_ != cudaSuccess) return;
    kernel<<<dim3(static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y)), kThreads, bytes, stream_>>>(call);
    error_ = cudaGetLastError();
  }
  cudaError_t error() const { return error_; }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

template <int D>
cudaError_t prepare_stages(const Call& call, int64_t max_tiles, int64_t num_units, cudaStream_t stream) {
  Launcher launcher(stream);
  launcher.launch(prepare_tiles<D>, max_tiles, num_units, kSlabFloats<D> + 2 * kSquare + kTile, call);
  launcher.launch(carry_keys<D>, max_tiles, num_units, kSlabFloats<D>, call);
  return launcher.error();
}

template <int D>
cudaError_t attend_stages(const Call& call, int64_t max_tiles, int64_t num_units, cudaStream_t stream) {
  Launcher launcher(stream);
  launcher.launch(call.w.data ? attend<D, true> : attend<D, false>, max_tiles, num_units * call.group, kSlabFloats<D> + kScores + kWide<D>, call);
  return launcher.error();
}

template <int D>
cudaError_t gradient_stages(const Call& call, int64_t max_tiles, int64_t num_units, cudaStream_t stream) {
  Launcher launcher(stream);
  const int64_t num_query_units = num_units * call.group;
  constexpr int kPairs = kSlabFloats<D> + kScores, kCarried = kPairs + kWide<D>;
  if (call.w.data == nullptr) {
    launcher.launch(plain_keys<D>, max_tiles, num_units, kPairs, call);
    launcher.launch(plain_queries<D>, max_tiles, num_query_units, kPairs, call);
    return launcher.error();
  }
  launcher.launch(carry_queries<D>, max_tiles, num_query_units, kCarried, call);
  launcher.launch(far_queries<D>, call.slots, num_query_units, kCarried, call);
  launcher.launch(far_keys<D>, call.slots, num_units, kCarried, call);
  launcher.launch(chunk_gradients<D>, max_tiles, num_units, kCarried, call);
  launcher.launch(tile_gradients<D>, max_tiles, num_units, kSlabFloats<D> + 2 * kSquare + 2 * kScores + kTile, call);
  return launcher.error();
}

}  // namespace pathattn::cuda
