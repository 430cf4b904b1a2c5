// Definitions of stages.h, instantiated by stages_*.cu.
#pragma once

#include "kernels/cuda/hopper/attend.cuh"
#include "kernels/cuda/hopper/carry.cuh"
#include "kernels/cuda/hopper/launcher.h"
#include "kernels/cuda/hopper/local.cuh"
#include "kernels/cuda/hopper/stages.h"

namespace pathattn::cuda::hopper {

template <int K, int V, bool kPath>
auto local_kernel(bool has_gate, bool backward) {
  if (backward) return attend_locally<K, V, kPath, false, true>;  // gates are the attention's alone
  return has_gate ? attend_locally<K, V, kPath, true, false> : attend_locally<K, V, kPath, false, false>;
}

template <int K, int V>
cudaError_t prepare_stages(const Call& call, int64_t num_units, cudaStream_t stream) {
  Launcher launcher(stream);
  const dim3 tiles(static_cast<unsigned>(call.max_tiles), static_cast<unsigned>(num_units));
  const bool backward = call.at.block_keys;
  const auto kernel = call.w.data ? local_kernel<K, V, true>(call.g.data, backward) : local_kernel<K, V, false>(call.g.data, backward);
  using Memory = LocalMemory<K, V>;
  launcher.launch(kernel, dim3(tiles.x * tiles.y), kLocalThreads, backward ? Memory::kBackwardTotal : Memory::kTotal, call,
                  static_cast<int>(num_units));
  for (int level = 0; level + 1 < call.num_levels; ++level)
    launcher.launch(carry_nodes<K>, dim3(tiles.x >> (2 * run_level(level)), tiles.y), 2 * K, CarryMemory<K>::kTotal, call, level);
  return launcher.error();
}

template <int K, int V>
cudaError_t attend_stage(const Call& call, int64_t num_units, int num_multiprocessors, cudaStream_t stream) {
  Launcher launcher(stream);
  const bool has_w = call.w.data, has_gate = call.g.data;
  const auto kernel =
      has_w ? (has_gate ? attend<K, V, true, true> : attend<K, V, true, false>) : (has_gate ? attend<K, V, false, true> : attend<K, V, false, false>);
  launcher.launch(kernel, dim3(num_multiprocessors), kAttendThreads, AttendMemory<K, V>::kTotal, call, static_cast<int>(num_units * call.group));
  return launcher.error();
}

}  // namespace pathattn::cuda::hopper
