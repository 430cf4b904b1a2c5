// Definitions of backward's stages (stages.h), instantiated by gradient_stages_*.cu.
#pragma once

#include "kernels/cuda/hopper/block_adjoint.cuh"
#include "kernels/cuda/hopper/carry_adjoint.cuh"
#include "kernels/cuda/hopper/chain.cuh"
#include "kernels/cuda/hopper/gradients.cuh"
#include "kernels/cuda/hopper/key_gradients.cuh"
#include "kernels/cuda/hopper/launcher.h"
#include "kernels/cuda/hopper/matrix_gradients.cuh"
#include "kernels/cuda/hopper/output_gradients.cuh"
#include "kernels/cuda/hopper/pair_adjoint.cuh"
#include "kernels/cuda/hopper/query_gradients.cuh"
#include "kernels/cuda/hopper/stages.h"

namespace pathattn::cuda::hopper {

template <int K, int V, bool kGate>
cudaError_t far_stages(const Call& call, const FarGradient& far, cudaStream_t stream) {
  const bool has_w = call.w.data;
  if (const cudaError_t error = plan(call, far, stream)) return error;
  if (has_w) {
    if (const cudaError_t error = launch_chain<K>(call, far, stream)) return error;
  }
  if (const cudaError_t error = launch_key_gradients<K, V, kGate>(call, far, stream)) return error;
  if (const cudaError_t error = launch_query_gradients<K, V, kGate>(call, far, stream)) return error;
  return has_w ? launch_matrix_gradients<K>(call, far, stream) : cudaSuccess;
}

template <int K, int V>
cudaError_t gradient_stages(const Call& call, const Gradients& gradients, int64_t num_units, cudaStream_t stream) {
  const bool has_w = call.w.data, has_gate = call.g.data;
  const unsigned num_query_units = static_cast<unsigned>(num_units * call.group), max_tiles = static_cast<unsigned>(call.max_tiles);
  const dim3 query_tiles(max_tiles, num_query_units);
  Launcher launcher(stream);
  launcher.launch(has_gate ? prepare_output_gradients<V, true> : prepare_output_gradients<V, false>, query_tiles, kLocalThreads, 0, call,
                  gradients.output);
  if (launcher.error() != cudaSuccess) return launcher.error();
  if (const cudaError_t error = has_gate ? far_stages<K, V, true>(call, gradients.far, stream) : far_stages<K, V, false>(call, gradients.far, stream))
    return error;
  for (int level = has_w ? call.num_levels - 2 : -1; level >= 0; --level)
    launcher.launch(differentiate_carry<K>, dim3(max_tiles >> (2 * run_level(level)), static_cast<unsigned>(num_units)), 2 * K,
                    CarryAdjointMemory<K>::kTotal, call, gradients.carry, level);
  if (launcher.error() != cudaSuccess) return launcher.error();
  if (const cudaError_t error = launch_pair_gradients<K, V>(call, gradients.far, gradients.pairs, stream)) return error;
  const dim3 blocks(2 * max_tiles * static_cast<unsigned>(num_units));
  const auto of_blocks = has_w ? (has_gate ? differentiate_blocks<K, V, true, true> : differentiate_blocks<K, V, true, false>)
                               : (has_gate ? differentiate_blocks<K, V, false, true> : differentiate_blocks<K, V, false, false>);
  launcher.launch(of_blocks, blocks, BlockMemory<K, V>::kThreads, BlockMemory<K, V>::kTotal, call, gradients.local);
  return launcher.error();
}

}  // namespace pathattn::cuda::hopper
