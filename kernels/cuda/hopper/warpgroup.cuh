// Work of a warpgroup on 64 rows: products of 64 x 64 blocks of images, and their results, 2 N columns in wgmma's order as N floats a thread.
#pragma once

#include "kernels/cuda/hopper/fragments.cuh"
#include "kernels/cuda/hopper/input.cuh"
#include "kernels/cuda/tensor.cuh"

namespace pathattn::cuda::hopper {

// The power of two that brings numbers up to `largest` into [2^13, 2^14).
__device__ inline float gradient_factor(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  if (largest == 0 || exponent > 127) return 1.f;
  return __uint_as_float(static_cast<uint32_t>(max(exponent - 13, -110) + 127) << 23);
}

inline constexpr int kBlockBytes = kBlock * 128;  // rows of a block in a panel

// The 64 x 64 block (i, j) of an image whose panels have 128 rows.
__device__ inline unsigned char* block(unsigned char* image, int i, int j) { return image + j * kPanelBytes + i * kBlockBytes; }

// d [64, 2 N] += A B over 64 of k, operands 64 x 64 blocks of images; B of 128 columns goes on in the next rows (kTransposeB 0) or panel (1).
template <int kTransposeA, int kTransposeB, int N>
__device__ void multiply(float (&d)[N], const unsigned char* a, const unsigned char* b) {
  const uint64_t left = descriptor(a), right = descriptor(b, kPanelBytes);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    wgmma<kTransposeA, kTransposeB>(d, advance(left, k * (kTransposeA ? 2048 : 32)), advance(right, k * (kTransposeB ? 2048 : 32)), true);
}
// The same without accumulation, whatever d held.
template <int kTransposeA, int kTransposeB, int N>
__device__ void multiply_first(float (&d)[N], const unsigned char* a, const unsigned char* b) {
  const uint64_t left = descriptor(a), right = descriptor(b, kPanelBytes);
  wgmma_first<kTransposeA, kTransposeB>(d, left, right);
#pragma unroll
  for (int k = 1; k < 4; ++k)
    wgmma<kTransposeA, kTransposeB>(d, advance(left, k * (kTransposeA ? 2048 : 32)), advance(right, k * (kTransposeB ? 2048 : 32)), true);
}
// d += what `issue` multiplies into it. A condition on the warpgroup stands around a call, never inside: products wait where control flow splits.
template <int N, typename Issue>
__device__ void accumulate(float (&d)[N], Issue issue) {
  hold(d);
  wgmma_fence();
  issue(d);
  wgmma_commit();
  wgmma_wait<0>();
  hold(d);
}
template <int N>
__device__ void scale(float (&d)[N], float factor) {
#pragma unroll
  for (int i = 0; i < N; ++i) d[i] *= factor;
}
// total += factor * d
template <int N>
__device__ void add_scaled(float (&total)[N], float factor, const float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) total[i] = fmaf(factor, d[i], total[i]);
}
template <int N, typename Issue>
__device__ void set_product(float (&total)[N], float factor, Issue issue) {
#pragma unroll
  for (int i = 0; i < N; ++i) total[i] = 0;
  accumulate(total, issue);
  scale(total, factor);
}
template <int N>
__device__ void zero(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) d[i] = 0;
}
template <int N>
__device__ float largest_of(const float (&d)[N]) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) most = fmaxf(most, fabsf(d[i]));
  return most;
}

// This lane's first row and column of d's 64 rows: float i is of row own_row() + 8 (i / 2 % 2), column fragment_column() + 8 (i / 4) + i % 2.
__device__ inline int own_row() { return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + fragment_row(); }
// visit(row of the block, column, x, y) for neighbouring columns.
template <int N, typename Visit>
__device__ void for_pairs(float (&d)[N], Visit visit) {
  const int row = own_row();
#pragma unroll
  for (int i = 0; i < N; i += 2) visit(row + i / 2 % 2 * 8, i / 4 * 8 + fragment_column(), d[i], d[i + 1]);
}
// The byte of this lane's first pair in a block, computed anew at each use: kept from use to use, the addresses made of it would fill the registers.
__device__ inline uint32_t own_byte() {
  uint32_t byte = threadIdx.x / 32 % 4 * 2048 + lane_byte_of_pair();
  asm volatile("" : "+r"(byte));
  return byte;
}
// Of pair e of d, seen from own_byte().
__device__ inline uint32_t byte_of_pair(uint32_t own_byte, int e) { return e / 16 * kPanelBytes + e % 2 * 1024 + (own_byte ^ (e / 2 % 8 * 16)); }
// Rows of block `i` of an image: d * by rounded; factor * stored.
template <int N>
__device__ void store_block(unsigned char* image, int i, const float (&d)[N], float by) {
  const uint32_t own = own_byte();
#pragma unroll
  for (int e = 0; e < N / 2; ++e)
    *reinterpret_cast<uint32_t*>(image + i * kBlockBytes + byte_of_pair(own, e)) = pack(d[2 * e] * by, d[2 * e + 1] * by);
}
template <int N>
__device__ void load_block(float (&d)[N], const unsigned char* image, int i, float factor) {
  const uint32_t own = own_byte();
#pragma unroll
  for (int e = 0; e < N / 2; ++e) {
    const float2 pair = unpack(*reinterpret_cast<const uint32_t*>(image + i * kBlockBytes + byte_of_pair(own, e)));
    d[2 * e] = factor * pair.x, d[2 * e + 1] = factor * pair.y;
  }
}
// Rows of block `i` of float32 rows, up to `count` of the tile's.
template <int N>
__device__ void add_rows(float (&d)[N], const float* rows, int i, int count) {
  const int row = kBlock * i + own_row();
  const float* at = rows + row * (2 * N) + fragment_column();
#pragma unroll
  for (int j = 0; j < N; j += 2) {
    const int half = j / 2 % 2;
    if (row + 8 * half >= count) continue;
    const float2 pair = *reinterpret_cast<const float2*>(at + half * (8 * 2 * N) + j / 4 * 8);
    d[j] += pair.x, d[j + 1] += pair.y;
  }
}
template <int N>
__device__ void set_rows(float (&d)[N], float* rows, int i) {
  float* at = rows + (kBlock * i + own_row()) * (2 * N) + fragment_column();
#pragma unroll
  for (int j = 0; j < N; j += 2) __stcg(reinterpret_cast<float2*>(at + j / 2 % 2 * (8 * 2 * N) + j / 4 * 8), make_float2(d[j], d[j + 1]));
}
// Block (i, j) of rows of `width` float32, up to `count` of the tile's.
__device__ inline void add_block(float (&d)[32], const float* rows, int i, int j, int width, int count) {
  const int row = kBlock * i + own_row();
  const float* from = rows + row * width + kBlock * j + fragment_column();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= count) break;
#pragma unroll
    for (int e = 2 * half; e < 32; e += 4) {
      const float2 pair = *reinterpret_cast<const float2*>(from + half * 8 * width + e / 4 * 8);
      d[e] += pair.x, d[e + 1] += pair.y;
    }
  }
}
// Up to `count` rows of a block to a tensor of float32 or of 16 bits, from element `first` on.
template <bool kFloat32>
__device__ void write_block(const Tensor& tensor, int64_t first, const float (&d)[32], int count) {
  const int64_t at = first + own_row() * tensor.token_stride + fragment_column();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (own_row() + 8 * half >= count) break;
    const int64_t at_row = at + 8 * half * tensor.token_stride;
#pragma unroll
    for (int e = 2 * half; e < 32; e += 4) {
      if constexpr (kFloat32) {
        __stcg(reinterpret_cast<float2*>(static_cast<float*>(tensor.data) + at_row + e / 4 * 8), make_float2(d[e], d[e + 1]));
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(tensor.data) + at_row + e / 4 * 8) = pack_output(d[e], d[e + 1], tensor.dtype);
      }
    }
  }
}
}  // namespace pathattn::cuda::hopper
