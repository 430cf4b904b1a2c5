// Gradients of the nodes' products G: dG = sum of q^T dq over the query tiles that pass the node, q before it and dq behind it, in the order of heads
// and tiles. A CTA owns a node, a consumer warpgroup 64 rows of dG.
#pragma once

#include "kernels/cuda/hopper/far_gradient.cuh"

namespace pathattn::cuda::hopper {

template <int K>
struct MatrixGradients {
  static constexpr int kGroups = K / 64, kStages = 3, kThreads = (kGroups + 1) * 128;
  struct Shared {
    alignas(1024) unsigned char queries[kStages][kImageBytes<K>];
    unsigned char d_queries[kStages][kImageBytes<K>];
    float factors[kStages];
    Barriers<kStages> steps;
  };

  static __device__ void produce(const Call& call, const FarGradient& far, Shared& shared, int slot, int64_t unit, int level,
                                 const LaterTiles& later) {
    const int index = call.at.tiles[slot].index;
    Ring<kStages> ring(shared.steps);
    for (int head = 0; head < call.group; ++head) {
      const int64_t query_unit = unit * call.group + head;
      for (int query = later.first; query < later.end; ++query) {
        const int query_slot = slot - index + query, segment = segment_of(query, level, index >> (2 * level));
        const int first_segment = far.first_segment[query_slot];
        const int64_t query_row = query_unit * call.max_tiles + query_slot, d_segment = query_unit * far.max_segments + first_segment + segment;
        const unsigned char* queries = segment_queries<K>(call, far, query_unit, query_row, first_segment, segment);
        const float factor = call.at.query_factors[query_row] * far.d_segment_factors[d_segment];
        ring.wait_empty();
        shared.factors[ring.stage] = factor;
        arrive_expecting(ring.full(), 2 * kImageBytes<K>);
        copy_bulk(shared.queries[ring.stage], queries, kImageBytes<K>, ring.full());
        copy_bulk(shared.d_queries[ring.stage], far.d_segments + d_segment * kImageBytes<K>, kImageBytes<K>, ring.full());
        ring.advance();
      }
    }
  }

  static __device__ void consume(const Call& call, const FarGradient& far, Shared& shared, float* d_matrix, const LaterTiles& later) {
    const int group = threadIdx.x / 128 - 1;
    float sum[K / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    Ring<kStages> ring(shared.steps);
    for (int steps = (later.end - later.first) * call.group; steps > 0; --steps) {
      float d[K / 2];
      ring.wait_full();
      const uint64_t queries = descriptor(shared.queries[ring.stage] + group * kPanelBytes, kPanelBytes);
      const uint64_t d_queries = descriptor(shared.d_queries[ring.stage], kPanelBytes);
      wgmma_fence();
      wgmma_first<1, 1>(d, queries, d_queries);
#pragma unroll
      for (int k = 16; k < kTile; k += 16) wgmma<1, 1>(d, advance(queries, k * 128), advance(d_queries, k * 128), true);
      wgmma_commit();
      const float factor = shared.factors[ring.stage];
      wgmma_wait<0>();
      hold(d);
      ring.release();
#pragma unroll
      for (int i = 0; i < K / 2; ++i) sum[i] = fmaf(d[i], factor, sum[i]);
    }
    write_rows<K>(d_matrix, sum, 1);
  }
};

// Of a node at its first tile; none passes its document's first.
template <int K>
__global__ void __launch_bounds__(MatrixGradients<K>::kThreads, 1)
    matrix_gradients(const __grid_constant__ Call call, const __grid_constant__ FarGradient far) {
  using Body = MatrixGradients<K>;
  const int slot = blockIdx.x, level = call.num_levels - 1 - blockIdx.y;
  const int64_t unit = blockIdx.z;
  if (slot >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[slot];
  const LaterTiles later(tile.index, tile.num_tiles, level, call.num_levels);
  const int node = tile.index >> (2 * level);
  if (node == 0 || tile.index != node << (2 * level) || later.first >= later.end) return;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Body::Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.steps.init(4 * Body::kGroups);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    Body::consume(call, far, shared, far.d_matrices[level] + matrix_slot(call, unit, slot, level) * K * K, later);
  } else if (threadIdx.x == 0) {
    Body::produce(call, far, shared, slot, unit, level, later);
  }
}

template <int K>
cudaError_t launch_matrix_gradients(const Call& call, const FarGradient& far, cudaStream_t stream) {
  using Body = MatrixGradients<K>;
  using Shared = typename Body::Shared;
  if (const cudaError_t error = cudaFuncSetAttribute(matrix_gradients<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared))) return error;
  matrix_gradients<K>
      <<<dim3(static_cast<unsigned>(call.max_tiles), call.num_levels, far.num_units), Body::kThreads, sizeof(Shared), stream>>>(call, far);
  return cudaGetLastError();
}

}  // namespace pathattn::cuda::hopper
