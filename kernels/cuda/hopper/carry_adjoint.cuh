// Backward of carry.cuh, levels coarse to fine: gradients of a level's keys and G gain what comes through their parents. With children c = 0 ... 3 of
// a parent, K' = K S_c^T its keys at the parent's end, S_3 = I, S_{c-1} = S_c G_c, and D_{-1} the gradient of the parent's G = S_{-1}:
//   dG_c += S_c^T D_{c-1}        D_c = D_{c-1} G_c^T + dK'^T K, the gradient of S_c        dK += dK' S_c
#pragma once

#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/local.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"

namespace pathattn::cuda::hopper {

// Gradients of keys and matrices, float32, where the call's workspace has them.
struct CarryGradients {
  float* dkeys[kMaxLevels];      // [unit][max_tiles][kTile][K]
  float* dmatrices[kMaxLevels];  // [unit][(max_tiles >> 2 level) + 1][K][K]; of fourth children set here
};

template <int K>
struct CarryAdjointMemory {
  static constexpr int kSuffix = 0, kMatrix = kSuffix + kMatrixBytes<K>, kProduct = kMatrix + kMatrixBytes<K>, kDkeys = kProduct + kMatrixBytes<K>,
                       kKeys = kDkeys + kImageBytes<K>, kMaxima = kKeys + kImageBytes<K>, kBarrier = kMaxima + 2 * 8 * 4, kTotal = kBarrier + 8;
};

// A CTA a parent node of level `level` + 1 (at its first tile) and key head; warpgroup i has rows 64 i ... of [K, K], and of the tiles' rows every
// K / 64-th block from i on.
template <int K>
__global__ void __launch_bounds__(2 * K, 1)
    differentiate_carry(const __grid_constant__ Call call, const __grid_constant__ CarryGradients gradients, int level) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Memory = CarryAdjointMemory<K>;
  constexpr int kHalf = K / 2, kWarps = 2 * K / 32, kGroups = K / 64;
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  const int child = 1 << (2 * level), parent = child * kRadix;
  if (tile.index % parent != 0 || tile.index + parent >= tile.num_tiles) return;
  const int64_t unit = blockIdx.y;
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  float* const maxima = reinterpret_cast<float*>(shared + Memory::kMaxima);
  uint64_t* const barrier = reinterpret_cast<uint64_t*>(shared + Memory::kBarrier);
  uint32_t parity = 0;
  int turn = 0;
  if (threadIdx.x == 0) {
    init_barrier(barrier, 1);
    fence_barrier_init();
  }
  const auto settle = [] {
    fence_async();
    __syncthreads();
  };
  const auto factor_of = [&](float x) {  // of the CTA's largest
    float* const now = maxima + 8 * (turn ^= 1);
    x = warp_max(x);
    if (lane_id() == 0) now[threadIdx.x / 32] = x;
    __syncthreads();
    float most = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) most = fmaxf(most, now[i]);
    return gradient_factor(most);
  };
  const auto await = [&] {
    wait(barrier, parity);
    parity ^= 1;
  };
  const auto matrix_block = [&](int offset, int i, int j) { return shared + offset + j * (K * 128) + i * kBlockBytes; };
  const auto dmatrix = [&](int c) { return gradients.dmatrices[level] + matrix_slot(call, unit, blockIdx.x + c * child, level) * K * K; };

  float d[kHalf];  // D
  zero(d);
  if (tile.index > 0) add_rows(d, gradients.dmatrices[level + 1] + matrix_slot(call, unit, blockIdx.x, level + 1) * K * K, group, K);
#pragma unroll 1
  for (int c = 0; c < kRadix - 1; ++c) {
    const int64_t slot_of_child = blockIdx.x + c * child;
    settle();
    if (threadIdx.x == 0) {
      const unsigned char* suffix = c == kRadix - 2
                                        ? call.at.matrices[level] + matrix_slot(call, unit, slot_of_child + child, level) * kMatrixBytes<K>
                                        : call.at.suffixes[level] + matrix_slot(call, unit, slot_of_child, level) * kMatrixBytes<K>;
      arrive_expecting(barrier, 2 * kMatrixBytes<K>);
      copy_bulk(shared + Memory::kSuffix, suffix, kMatrixBytes<K>, barrier);
      copy_bulk(shared + Memory::kMatrix, call.at.matrices[level] + matrix_slot(call, unit, slot_of_child, level) * kMatrixBytes<K>, kMatrixBytes<K>,
                barrier);
    }
    const float factor = factor_of(largest_of(d));
    for_pairs(d, [&](int r, int column, float x, float y) {
      const float by = reciprocal_of_power(factor);
      store_own(shared + Memory::kProduct, kBlock * group + r, column, pack(x * by, y * by), K);
    });
    settle();
    await();
    if (tile.index + c > 0) {
      float dg[kHalf];
      set_product(dg, factor, [&](float(&p)[kHalf]) {
#pragma unroll
        for (int k = 0; k < kGroups; ++k) multiply<1, 1>(p, matrix_block(Memory::kSuffix, k, group), matrix_block(Memory::kProduct, k, 0));
      });
      add_rows(dg, dmatrix(c), group, K);
      set_rows(dg, dmatrix(c), group);
    }
    set_product(d, factor, [&](float(&p)[kHalf]) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) multiply<0, 0>(p, matrix_block(Memory::kProduct, group, k), matrix_block(Memory::kMatrix, 0, k));
    });

#pragma unroll 1
    for (int t = 0; t < child; ++t) {
      const int64_t at = slot(call, unit, slot_of_child + t);
      const float *from = gradients.dkeys[level + 1] + at * kTile * K, key_factor = call.at.key_factors[at];
      float* const to = gradients.dkeys[level] + at * kTile * K;
      settle();
      if (threadIdx.x == 0) {
        arrive_expecting(barrier, kImageBytes<K>);
        copy_bulk(shared + Memory::kKeys, call.at.keys[level] + at * kImageBytes<K>, kImageBytes<K>, barrier);
      }
      float dk[2 / kGroups][kHalf], most = 0;
#pragma unroll
      for (int i = 0; i < 2 / kGroups; ++i) {
        zero(dk[i]);
        add_rows(dk[i], from, group + i, kTile);
        most = fmaxf(most, largest_of(dk[i]));
      }
      const float dkey_factor = factor_of(most);
#pragma unroll
      for (int i = 0; i < 2 / kGroups; ++i) store_block(shared + Memory::kDkeys, group + i, dk[i], reciprocal_of_power(dkey_factor));
      settle();
      await();
      add_product(d, dkey_factor * key_factor, [&](float(&p)[kHalf]) {
#pragma unroll
        for (int k = 0; k < 2; ++k) multiply<1, 1>(p, block(shared + Memory::kDkeys, k, group), block(shared + Memory::kKeys, k, 0));
      });
#pragma unroll
      for (int i = 0; i < 2 / kGroups; ++i) {
        set_product(dk[i], dkey_factor, [&](float(&p)[kHalf]) {
#pragma unroll
          for (int k = 0; k < kGroups; ++k) multiply<0, 1>(p, block(shared + Memory::kDkeys, group + i, k), matrix_block(Memory::kSuffix, k, 0));
        });
        add_rows(dk[i], to, group + i, kTile);
        set_rows(dk[i], to, group + i);
      }
    }
  }
  set_rows(d, dmatrix(kRadix - 1), group);
  const int64_t first = slot(call, unit, blockIdx.x + (kRadix - 1) * child) * kTile * K;
  const auto* from = reinterpret_cast<const float4*>(gradients.dkeys[level + 1] + first);
  auto* to = reinterpret_cast<float4*>(gradients.dkeys[level] + first);
  for (int64_t i = threadIdx.x; i < int64_t{child} * kTile * K / 4; i += 2 * K) {
    const float4 x = from[i], y = to[i];
    to[i] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
  }
}

}  // namespace pathattn::cuda::hopper
