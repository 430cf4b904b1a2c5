// Products of 64-row blocks by 256 threads, in float32: operands are read through small slabs of shared memory, results stay in registers.
#pragma once

#include <cuda_runtime.h>

namespace pathattn::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kTile = 64;  // rows of a block, tokens of a tile

// 64 x N numbers in the registers of a CTA: thread (ty, tx) of 16 x 16 holds rows 4 ty ... 4 ty + 3, columns 64 b + 4 tx ... + 3.
template <int N>
struct Block {
  float x[N / 64][4][4];

  __device__ void clear() {
#pragma unroll
    for (int b = 0; b < N / 64; ++b)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) x[b][r][c] = 0;
  }

  // visit(row, column, value&) for this thread's numbers.
  template <typename Visit>
  __device__ void for_each(Visit visit) {
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int b = 0; b < N / 64; ++b)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) visit(4 * ty + r, 64 * b + 4 * tx + c, x[b][r][c]);
  }
};

// combine over the 16 threads that share a row.
template <typename Combine>
__device__ float across_row(float x, Combine combine) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ inline float row_sum(float x) {
  return across_row(x, [](float a, float b) { return a + b; });
}
__device__ inline float row_max(float x) {
  return across_row(x, [](float a, float b) { return fmaxf(a, b); });
}

template <int N>
inline constexpr int kSlabDepth = N > 128 ? 8 : 16;
template <int N>
inline constexpr int kSlabFloats = kSlabDepth<N>*(kTile + 4 + N + 4);

// Which index of an operand runs along memory: how its slab is read.
enum class Along { kDepth, kOther };

// c += A B with a(i, p), i < 64, and b(p, j), j < N, for p < depth. Begins and ends with a barrier: what the operands read may be rewritten after.
template <Along kA, Along kB, int N, typename A, typename B>
__device__ void multiply(Block<N>& c, int depth, A a, B b, float* slab) {
  constexpr int kDepth = kSlabDepth<N>, kRowA = kTile + 4, kRowB = N + 4;
  float* const slab_b = slab + kDepth * kRowA;
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  __syncthreads();
  for (int p0 = 0; p0 < depth; p0 += kDepth) {
#pragma unroll
    for (int e = threadIdx.x; e < kDepth * kTile; e += kThreads) {
      const int p = kA == Along::kDepth ? e % kDepth : e / kTile, i = kA == Along::kDepth ? e / kDepth : e % kTile;
      slab[p * kRowA + i] = p0 + p < depth ? a(i, p0 + p) : 0.f;
    }
#pragma unroll
    for (int e = threadIdx.x; e < kDepth * N; e += kThreads) {
      const int p = kB == Along::kDepth ? e % kDepth : e / N, j = kB == Along::kDepth ? e / kDepth : e % N;
      slab_b[p * kRowB + j] = p0 + p < depth ? b(p0 + p, j) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kDepth; ++p) {
      const float4 left = *reinterpret_cast<const float4*>(slab + p * kRowA + 4 * ty);
#pragma unroll
      for (int n = 0; n < N / 64; ++n) {
        const float4 right = *reinterpret_cast<const float4*>(slab_b + p * kRowB + 64 * n + 4 * tx);
        const float l[4] = {left.x, left.y, left.z, left.w}, r[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) c.x[n][i][j] = fmaf(l[i], r[j], c.x[n][i][j]);
      }
    }
    __syncthreads();
  }
}

}  // namespace pathattn::cuda
