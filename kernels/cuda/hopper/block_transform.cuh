// The UT transform of a tile's two blocks of 64 tokens (docs/mathematics.md): Y = (I + N)^-1 with N = tril(beta_i w_i w_j, -1), in float32.
#pragma once

#include "kernels/cuda/hopper/fragments.cuh"

namespace pathattn::cuda::hopper {

// N is kept below the diagonal of a square, Y transposed on and above it: Y(i, j) at [j][i].
inline constexpr int kSquareStride = kBlock + 1;
inline constexpr int kSquareFloats = kBlock * kSquareStride;

struct Square {
  float* at;
  __device__ float n(int i, int j) const { return at[i * kSquareStride + j]; }  // j < i
  __device__ float y(int i, int j) const { return j <= i ? at[j * kSquareStride + i] : 0.f; }
  __device__ float& y_at(int i, int j) const { return at[j * kSquareStride + i]; }  // j <= i
};

// Y of 16 rows and columns from `first` on, by substitution: a lane a column. One warp.
__device__ inline void invert_16(const Square& square, int first) {
  const int column = lane_id();
  if (column < 16) {
    float y[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum = i == column ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < i; ++j) sum = fmaf(-square.n(first + i, first + j), y[j], sum);
      y[i] = sum;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i >= column) square.y_at(first + i, first + column) = y[i];
  }
}

// From Y of neighbouring pairs of S x S blocks on the diagonal to Y of the 2 S x 2 S: Y21 = -Y22 (N21 Y11). The four warps of a block, `barrier`
// theirs.
template <int S>
__device__ void merge_inverses(const Square& square, int warp, int barrier) {
  constexpr int kBlocks = S == 16 ? 1 : 2;
  static_assert(S == 16 || S == 32);
  const int pair = S == 16 ? warp / 2 : 0, row = S == 16 ? 0 : warp / 2 * 16, column = warp % 2 * (8 * kBlocks);
  const int top = pair * 2 * S, bottom = top + S;
  float z[kBlocks][4];
  const auto store = [&](bool negative) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        square.y_at(bottom + row + fragment_row() + i / 2 * 8, top + column + 8 * n + fragment_column() + i % 2) = negative ? -z[n][i] : z[n][i];
  };
  clear(z);
#pragma unroll
  for (int k = 0; k < S; k += 16)
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      multiply_split(
          z[n], [&](int i, int p) { return square.n(bottom + row + i, top + k + p); },
          [&](int p, int j) { return square.y(top + k + p, top + column + 8 * n + j); });
  store(false);
  sync_threads(barrier, 128);
  clear(z);
#pragma unroll
  for (int k = 0; k < S; k += 16)
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      multiply_split(
          z[n], [&](int i, int p) { return square.y(bottom + row + i, bottom + k + p); },
          [&](int p, int j) { return square.at[(top + column + 8 * n + j) * kSquareStride + bottom + k + p]; });
  sync_threads(barrier, 128);
  store(true);
  sync_threads(barrier, 128);
}

}  // namespace pathattn::cuda::hopper
