// Backward of carry.cuh, levels coarse to fine: gradients of a level's keys and G gain what comes through their parents. With children c = 0 ... 3 of
// a parent, K' = K S_c^T its keys at the parent's end, S_3 = I, S_{c-1} = S_c G_c, and D_{-1} the gradient of the parent's G = S_{-1}:
//   dK += dK' S_c        D_c = D_{c-1} G_c^T + dK'^T K, the gradient of S_c        dG_c += S_c^T D_{c-1}
#pragma once

#include <cfloat>

#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/carry.cuh"
#include "kernels/cuda/hopper/local.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"

namespace pathattn::cuda::hopper {

// Gradients of keys and matrices, float32, where the call's workspace has them.
struct CarryGradients {
  float* dkeys[kMaxLevels];      // [unit][max_tiles][kTile][K]
  float* dmatrices[kMaxLevels];  // [unit][(max_tiles >> 2 level) + 1][K][K]; of fourth children set here
  float* sums;                   // [unit][max_tiles][K][K] at a run's first tile: dK'^T K in the order of threads
};

// Of blocks of 64 rows, then, in the same place, of products.
template <int K>
struct CarryAdjointMemory {
  static constexpr int kSuffix = 0, kDkeys = kMatrixBytes<K>, kKeys = kDkeys + kHalfImageBytes<K>, kRows = kKeys + 2 * kHalfImageBytes<K>,
                       kMaxima = kRows + 2 * kHalfImageBytes<K>, kBarrier = kMaxima + 2 * 8 * 4, kIsLast = kBarrier + 8, kTotal = kIsLast + 8;
  static constexpr int kMatrix = kDkeys, kProduct = kMatrix + kMatrixBytes<K>;
  static_assert(kProduct + kMatrixBytes<K> <= kMaxima);
};

// To numbers of global memory to which nothing else is added meanwhile, so that bits do not depend on an order.
__device__ inline void add_pair(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

template <int K>
struct CarryAdjoint {
  using Memory = CarryAdjointMemory<K>;
  static constexpr int kThreads = 2 * K, kGroups = K / 64;
  const Call& call;
  const CarryGradients& gradients;
  unsigned char* shared;
  int64_t unit, parent;  // the parent's first tile slot
  int level;
  int turn = 0;  // of largest() and of the barrier

  __device__ int child() const { return 1 << (2 * level); }
  __device__ int runs_of_child() const { return 1 << (2 * (level - run_level(level))); }
  // Warpgroup i has rows 64 i ... of [K, K], and columns 64 i ... of a block's rows.
  __device__ int group() const { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0); }
  __device__ uint64_t* barrier() const { return reinterpret_cast<uint64_t*>(shared + Memory::kBarrier); }
  __device__ unsigned char* matrix_block(int matrix, int i, int j) const { return shared + matrix + j * (K * 128) + i * kBlockBytes; }
  __device__ const unsigned char* matrix_at(int c) const {
    return call.at.matrices[level] + matrix_slot(call, unit, parent + c * child(), level) * kMatrixBytes<K>;
  }
  __device__ const unsigned char* suffix_at(int c) const {
    return c == kRadix - 2 ? matrix_at(c + 1) : call.at.suffixes[level] + matrix_slot(call, unit, parent + c * child(), level) * kMatrixBytes<K>;
  }
  __device__ float* dmatrix_at(int c) const { return gradients.dmatrices[level] + matrix_slot(call, unit, parent + c * child(), level) * K * K; }
  __device__ float4* sums_at(int64_t run) const { return reinterpret_cast<float4*>(gradients.sums + slot(call, unit, run) * K * K) + threadIdx.x; }

  // The CTA's largest. All threads have come here, once it returns.
  __device__ float largest(float x) {
    float* const maxima = reinterpret_cast<float*>(shared + Memory::kMaxima) + 8 * (turn & 1);
    x = warp_max(x);
    if (lane_id() == 0) maxima[threadIdx.x / 32] = x;
    __syncthreads();
    float most = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) most = fmaxf(most, maxima[i]);
    return most;
  }
  __device__ void add_to_rows(float* rows, const float (&d)[32]) const {
    float* const to = rows + own_row() * K + fragment_column();
#pragma unroll
    for (int e = 0; e < 32; e += 2) add_pair(to + e / 2 % 2 * 8 * K + e / 4 * 8, d[e], d[e + 1]);
  }

  // Of fourth children, dK += dK'.
  __device__ void add_rows_of_run(int64_t first, int tiles) const {
    constexpr int kAtOnce = 8;
    const int64_t start = slot(call, unit, first) * kTile * K;
    const auto* from = reinterpret_cast<const float4*>(gradients.dkeys[level + 1] + start) + threadIdx.x;
    auto* to = reinterpret_cast<float4*>(gradients.dkeys[level] + start) + threadIdx.x;
#pragma unroll 1
    for (int rows = 0; rows < tiles * kTile; rows += 64, from += kAtOnce * kThreads, to += kAtOnce * kThreads) {
      float4 x[kAtOnce], y[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i] = from[i * kThreads], y[i] = to[i * kThreads];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) to[i * kThreads] = {x[i].x + y[i].x, x[i].y + y[i].y, x[i].z + y[i].z, x[i].w + y[i].w};
    }
  }

  // dK += dK' S_c over the tiles of a run, and its dK'^T K, in blocks of 64 rows.
  __device__ void differentiate_keys(int64_t first, int tiles, int c) {
    constexpr int kLoads = kBlock * K / 4 / kThreads;
    const int64_t at = slot(call, unit, first);
    const int num_blocks = 2 * tiles, group = this->group();
    const auto keys_at = [&](int b) { return shared + Memory::kKeys + b % 2 * kHalfImageBytes<K>; };
    const auto load = [&](int b) {
      constexpr int kRowBytes = kBlock * K * 4;
      arrive_expecting(barrier(), kRowBytes + kHalfImageBytes<K> + (b == 0 ? kMatrixBytes<K> : 0));
      copy_bulk(shared + Memory::kRows, gradients.dkeys[level + 1] + (at * 2 + b) * kBlock * K, kRowBytes, barrier());
      if (b == 0) copy_bulk(shared + Memory::kSuffix, suffix_at(c), kMatrixBytes<K>, barrier());
      for (int panel = 0; panel < kGroups; ++panel)
        copy_bulk(keys_at(b) + panel * kBlockBytes, call.at.keys[level] + (at + b / 2) * kImageBytes<K> + panel * kPanelBytes + b % 2 * kBlockBytes,
                  kBlockBytes, barrier());
    };
    if (threadIdx.x == 0) load(0);
    const auto* rows = reinterpret_cast<const float4*>(shared + Memory::kRows) + threadIdx.x;
    float sum[K / 2], unit = 0;  // dK'^T K is unit * sum
    zero(sum);
#pragma unroll 1
    for (int b = 0; b < num_blocks; ++b, ++turn) {
      const float key_factor = call.at.key_factors[at + b / 2];
      unsigned char* const image = shared + opaque(Memory::kDkeys);  // addresses anew: kept, they would fill the registers
      float factor;
      wait(barrier(), turn & 1);
      {
        float4 x[kLoads];
        float most = 0;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          x[i] = rows[i * kThreads];
          most = fmaxf(most, fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w))));
        }
        most = largest(most);
        if (threadIdx.x == 0 && b + 1 < num_blocks) load(b + 1);
        if (most == 0) continue;
        // Not so small that what is there would leave float32's range in the new unit.
        factor = fmaxf(gradient_factor(most), unit * 0x1p-64f * reciprocal_of_power(key_factor));
        const float by = reciprocal_of_power(factor);
        unsigned char* const own = image + image_byte(threadIdx.x / (K / 4), threadIdx.x % (K / 4) * 4, kBlock);
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          *reinterpret_cast<uint2*>(own + i * 8 * 128) = {pack(x[i].x * by, x[i].y * by), pack(x[i].z * by, x[i].w * by)};
      }
      fence_async();
      const float new_unit = fmaxf(factor * key_factor, FLT_MIN);
      scale(sum, unit / new_unit);
      unit = new_unit;
      __syncthreads();
      accumulate(sum, [&](float(&p)[K / 2]) {
        const uint64_t left = descriptor(image + group * kBlockBytes), right = descriptor(keys_at(b), kBlockBytes);
#pragma unroll
        for (int k = 0; k < kBlock / 16; ++k) wgmma<1, 1>(p, advance(left, k * 2048), advance(right, k * 2048), true);
      });
      float d[32];
      set_product(d, factor, [&](float(&p)[32]) {
#pragma unroll
        for (int k = 0; k < kGroups; ++k) multiply<0, 1>(p, image + k * kBlockBytes, matrix_block(Memory::kSuffix, k, group));
      });
      add_to_rows(gradients.dkeys[level] + (at * 2 + b) * kBlock * K + kBlock * group, d);
    }
    scale(sum, unit);
    float4* const sums = sums_at(first);
#pragma unroll
    for (int i = 0; i < K / 8; ++i) sums[i * kThreads] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
  }

  // D through the children, and their dG.
  __device__ void differentiate_matrices(bool is_first_of_document) {
    const int group = this->group();
    const auto load = [&](int c) {
      arrive_expecting(barrier(), 2 * kMatrixBytes<K>);
      copy_bulk(shared + Memory::kMatrix, matrix_at(c), kMatrixBytes<K>, barrier());
      copy_bulk(shared + Memory::kSuffix, suffix_at(c), kMatrixBytes<K>, barrier());
    };
    if (threadIdx.x == 0)
      for (int c = 1; c < kRadix - 1; ++c) prefetch_bulk(matrix_at(c), kMatrixBytes<K>);
    float d[K / 2];
    zero(d);
    if (!is_first_of_document) add_rows(d, gradients.dmatrices[level + 1] + matrix_slot(call, unit, parent, level + 1) * K * K, group, K);
#pragma unroll 1
    for (int c = 0; c < kRadix - 1; ++c, ++turn) {
      const float factor = gradient_factor(largest(largest_of(d)));
      if (threadIdx.x == 0) load(c);
      {
        uint32_t a[K / 16][4];
        scale(d, reciprocal_of_power(factor));
        round_rows(a, d);
        write_rounded(shared + Memory::kProduct, a, static_cast<int>(threadIdx.x) / 32 * 16, K);
      }
      fence_async();
      __syncthreads();
      wait(barrier(), turn & 1);
      set_product(d, factor, [&](float(&p)[K / 2]) {
#pragma unroll
        for (int k = 0; k < kGroups; ++k) multiply<0, 0>(p, matrix_block(Memory::kProduct, group, k), matrix_block(Memory::kMatrix, 0, k));
      });
#pragma unroll 1
      for (int r = 0; r < runs_of_child(); ++r) {
        const float4* const sums = sums_at(parent + c * child() + r * (child() / runs_of_child()));
#pragma unroll
        for (int i = 0; i < K / 8; ++i) {
          const float4 x = __ldcg(sums + i * kThreads);
          d[4 * i] += x.x, d[4 * i + 1] += x.y, d[4 * i + 2] += x.z, d[4 * i + 3] += x.w;
        }
      }
      if (is_first_of_document && c == 0) continue;
#pragma unroll 1
      for (int j = 0; j < kGroups; ++j) {
        float dg[32];
        set_product(dg, factor, [&](float(&p)[32]) {
#pragma unroll
          for (int k = 0; k < kGroups; ++k) multiply<1, 1>(p, matrix_block(Memory::kSuffix, k, group), matrix_block(Memory::kProduct, k, j));
        });
        add_to_rows(dmatrix_at(c) + kBlock * group * K + kBlock * j, dg);
      }
    }
    set_rows(d, dmatrix_at(kRadix - 1), group);
  }
};

// A CTA a run of tiles of a child of level `level` and key head. The last of a parent's first three children to come passes D on.
template <int K>
__global__ void __launch_bounds__(2 * K, K == 64 ? 4 : 2)
    differentiate_carry(const __grid_constant__ Call call, const __grid_constant__ CarryGradients gradients, int level) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int run = run_level(level), tiles = 1 << (2 * run);
  const Node node(call, blockIdx.x, run, level + 1);
  if (!node.carried) return;
  const int c = (node.index >> (2 * level)) % kRadix, in_parent = node.index % (kRadix << (2 * level));
  CarryAdjoint<K> adjoint{call, gradients, shared, blockIdx.y, node.first - in_parent, level};
  if (c == kRadix - 1) return adjoint.add_rows_of_run(node.first, tiles);
  if (threadIdx.x == 0) {
    init_barrier(adjoint.barrier(), 1);
    fence_barrier_init();
  }
  __syncthreads();
  adjoint.differentiate_keys(node.first, tiles, c);
  int& is_last = *reinterpret_cast<int*>(shared + CarryAdjointMemory<K>::kIsLast);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned others = (kRadix - 1) * adjoint.runs_of_child() - 1;
    is_last = atomicInc(call.at.arrivals + slot(call, blockIdx.y, adjoint.parent), others) == others;  // and 0 again for the next level
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  adjoint.differentiate_matrices(node.index == in_parent);
}

}  // namespace pathattn::cuda::hopper
