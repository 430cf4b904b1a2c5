// The queries before every segment that their tile meets, right to left: q <- q G after each, rounded as the forward pass rounds them.
#pragma once

#include "kernels/cuda/hopper/far_gradient.cuh"

namespace pathattn::cuda::hopper {

template <int K>
struct Chain {
  static constexpr int kStages = 3;
  struct Shared {
    alignas(1024) unsigned char rows[kImageBytes<K>];  // the tile's queries, then each image on its way out
    unsigned char matrices[kStages][kMatrixBytes<K>];
    Barriers<kStages> steps;
    uint64_t rows_ready;
  };

  static __device__ void produce(const Call& call, const FarGradient& far, Shared& shared, int slot, int64_t query_unit) {
    const Tile tile = call.at.tiles[slot];
    int carries = num_carries(tile.index, call.num_levels);
    arrive_expecting(&shared.rows_ready, kImageBytes<K>);
    copy_bulk(shared.rows, call.at.queries + (query_unit * call.max_tiles + slot) * kImageBytes<K>, kImageBytes<K>, &shared.rows_ready);
    Ring<kStages> ring(shared.steps);
    for (int level = 0; level < call.num_levels; ++level) {
      const Siblings siblings(tile.index, level, call.num_levels);
      for (int node = siblings.last; node >= siblings.first && carries > 0; --node, --carries) {
        const int64_t matrix = matrix_slot(call, query_unit / call.group, slot - tile.index + (node << (2 * level)), level);
        ring.wait_empty();
        arrive_expecting(ring.full(), kMatrixBytes<K>);
        copy_bulk(shared.matrices[ring.stage], call.at.matrices[level] + matrix * kMatrixBytes<K>, kMatrixBytes<K>, ring.full());
        ring.advance();
      }
    }
  }

  static __device__ void consume(const Call& call, const FarGradient& far, Shared& shared, int slot, int64_t query_unit) {
    const int carries = num_carries(call.at.tiles[slot].index, call.num_levels);
    unsigned char* images = far.segments + (query_unit * far.max_segments + far.first_segment[slot]) * kImageBytes<K>;
    uint32_t q[K / 16][4];
    wait(&shared.rows_ready, 0);
    load_rows_as_a<K>(q, shared.rows);
    Ring<kStages> ring(shared.steps);
    for (int i = 0; i < carries; ++i) {
      float carried[K / 2];
      ring.wait_full();
      const uint64_t matrix = descriptor(shared.matrices[ring.stage], K * 128);
      wgmma_fence();
      wgmma_first<1>(carried, q[0], matrix);
#pragma unroll
      for (int k = 16; k < K; k += 16) wgmma<1>(carried, q[k / 16], advance(matrix, k * 128), true);
      wgmma_commit();
      wgmma_wait<0>();
      hold(carried);
      ring.release();
      round_rows<K>(q, carried, 1);
      write_image<K>(images + static_cast<int64_t>(i) * kImageBytes<K>, shared.rows, q);
    }
    if (threadIdx.x % 128 == 0) wait_bulk_read();
  }
};

template <int K>
__global__ void __launch_bounds__(kFarThreads, 1) chain(const __grid_constant__ Call call, const __grid_constant__ FarGradient far) {
  const int slot = blockIdx.x;
  if (slot >= *call.at.num_tiles || num_carries(call.at.tiles[slot].index, call.num_levels) == 0) return;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Chain<K>::Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.steps.init();
    init_barrier(&shared.rows_ready, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    Chain<K>::consume(call, far, shared, slot, blockIdx.y);
  } else if (threadIdx.x == 0) {
    Chain<K>::produce(call, far, shared, slot, blockIdx.y);
  }
}

template <int K>
cudaError_t launch_chain(const Call& call, const FarGradient& far, cudaStream_t stream) {
  using Shared = typename Chain<K>::Shared;
  if (const cudaError_t error = cudaFuncSetAttribute(chain<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared))) return error;
  chain<K><<<dim3(static_cast<unsigned>(call.max_tiles), far.num_units * call.group), kFarThreads, sizeof(Shared), stream>>>(call, far);
  return cudaGetLastError();
}

}  // namespace pathattn::cuda::hopper
