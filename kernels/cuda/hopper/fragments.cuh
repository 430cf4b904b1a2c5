// Products by one warp, 16 rows at a time, over float16 operands in shared memory (layout.cuh's images) or registers.
#pragma once

#include "kernels/cuda/hopper/layout.cuh"
#include "kernels/cuda/hopper/ptx.cuh"

namespace pathattn::cuda::hopper {

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
// Of a d fragment: register i holds row fragment_row() + 8 (i / 2), column fragment_column() + i % 2 of its 16 x 8.
__device__ inline int fragment_row() { return lane_id() / 4; }
__device__ inline int fragment_column() { return lane_id() % 4 * 2; }

// Bytes from the start of 16 rows and 16 columns of an image at which a lane of ldmatrix begins, before `at` moves it by whole 8s of rows and
// columns: matrices one above the other first,
__device__ inline uint32_t lane_byte_down() {
  const int lane = lane_id();
  return lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
}
// or side by side first.
__device__ inline uint32_t lane_byte_across() {
  const int lane = lane_id();
  return (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16;
}
// And that of a pair of a d fragment.
__device__ inline uint32_t lane_byte_of_pair() { return fragment_row() * (128 + 16) + fragment_column() * 2; }
// The swizzle is an exclusive or, so that eights of columns enter as one and a lane's byte is computed once.
__device__ inline uint32_t at(uint32_t lane_byte, int row, int column, int panel_rows) {
  return (column / 64 * panel_rows + row) * 128 + (lane_byte ^ (column % 64 / 8 * 16));
}

// 16 x 16 A: rows of the product are rows of the image.
__device__ inline void load_a(uint32_t (&a)[4], uint32_t image, int row, int column, int panel_rows = kTile) {
  load_matrices(a, image + at(lane_byte_down(), row, column, panel_rows));
}
// The same of the transposed image: rows of the product are its columns.
__device__ inline void load_a_transposed(uint32_t (&a)[4], uint32_t image, int row, int column, int panel_rows = kTile) {
  load_matrices_transposed(a, image + at(lane_byte_across(), column, row, panel_rows));
}
// 16 x 16 B as two of 16 x 8, {b[0], b[1]} and {b[2], b[3]}: B's columns are the image's rows,
__device__ inline void load_b(uint32_t (&b)[4], uint32_t image, int k, int column, int panel_rows = kTile) {
  load_matrices(b, image + at(lane_byte_across(), column, k, panel_rows));
}
// or B's rows are.
__device__ inline void load_b_transposed(uint32_t (&b)[4], uint32_t image, int k, int column, int panel_rows = kTile) {
  load_matrices_transposed(b, image + at(lane_byte_down(), k, column, panel_rows));
}

template <int N>
__device__ void clear(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) d[n][i] = 0;
}

// The k-th 16 columns of a rounded d fragment, as A.
template <int N>
__device__ void round_to_a(uint32_t (&a)[4], const float (&d)[N][4], int k) {
  a[0] = pack(d[2 * k][0], d[2 * k][1]);
  a[1] = pack(d[2 * k][2], d[2 * k][3]);
  a[2] = pack(d[2 * k + 1][0], d[2 * k + 1][1]);
  a[3] = pack(d[2 * k + 1][2], d[2 * k + 1][3]);
}
template <int N>
__device__ void unround(float (&d)[N][4], const uint32_t (&a)[4], int k) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(a[i]);
    d[2 * k + i / 2][i % 2 * 2] = pair.x;
    d[2 * k + i / 2][i % 2 * 2 + 1] = pair.y;
  }
}

// d += a B for 16 rows of B from image row `k` on, columns from `column` on.
template <int N>
__device__ void multiply_a_rows(float (&d)[N][4], const uint32_t (&a)[4], uint32_t image, int k, int column, int panel_rows = kTile) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    uint32_t b[4];
    load_b_transposed(b, image, k, column + 16 * n, panel_rows);
    mma(d[2 * n], a, b[0], b[1]);
    mma(d[2 * n + 1], a, b[2], b[3]);
  }
}
// The same with a in two terms.
template <int N>
__device__ void multiply_a_rows(float (&d)[N][4], const uint32_t (&high)[4], const uint32_t (&low)[4], uint32_t image, int k, int column,
                                int panel_rows = kTile) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    uint32_t b[4];
    load_b_transposed(b, image, k, column + 16 * n, panel_rows);
    mma(d[2 * n], low, b[0], b[1]);
    mma(d[2 * n + 1], low, b[2], b[3]);
    mma(d[2 * n], high, b[0], b[1]);
    mma(d[2 * n + 1], high, b[2], b[3]);
  }
}
// d += a B for 16 columns of the image, from `k` on, whose rows from `column` on are B's columns: 16 of them,
__device__ inline void multiply_a_16_columns(float (&left)[4], float (&right)[4], const uint32_t (&a)[4], uint32_t image, int k, int column,
                                             int panel_rows = kTile) {
  uint32_t b[4];
  load_b(b, image, k, column, panel_rows);
  mma(left, a, b[0], b[1]);
  mma(right, a, b[2], b[3]);
}
// or as many as d has.
template <int N>
__device__ void multiply_a_columns(float (&d)[N][4], const uint32_t (&a)[4], uint32_t image, int k, int column, int panel_rows = kTile) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) multiply_a_16_columns(d[2 * n], d[2 * n + 1], a, image, k, column + 16 * n, panel_rows);
}

// d += a b with a(row, k) of 16 x 16 and b(k, column) of 16 x 8 in float32: float16 in two terms each, nearly float32's accuracy.
template <typename A, typename B>
__device__ void multiply_split(float (&d)[4], A a, B b) {
  const int row = fragment_row(), column = fragment_column();
  const auto split = [](float x, float y, uint32_t& high, uint32_t& low) {
    high = pack(x, y);
    const float2 rounded = unpack(high);
    low = pack(x - rounded.x, y - rounded.y);
  };
  uint32_t a_high[4], a_low[4], b_high[2], b_low[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row + i % 2 * 8, k = column + i / 2 * 8;
    split(a(r, k), a(r, k + 1), a_high[i], a_low[i]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) split(b(column + 8 * i, row), b(column + 8 * i + 1, row), b_high[i], b_low[i]);
  mma(d, a_low, b_high[0], b_high[1]);
  mma(d, a_high, b_low[0], b_low[1]);
  mma(d, a_high, b_high[0], b_high[1]);
}

// The pair of a d fragment's row (0 or 8 below fragment_row()) whose 8 columns begin at `column`, of 16 rows from `row` on.
__device__ inline void store_pair(unsigned char* image, int row, int column, uint32_t pair, int panel_rows = kTile) {
  *reinterpret_cast<uint32_t*>(image + at(lane_byte_of_pair(), row, column, panel_rows)) = pair;
}
__device__ inline uint32_t load_pair(const unsigned char* image, int row, int column, int panel_rows = kTile) {
  return *reinterpret_cast<const uint32_t*>(image + at(lane_byte_of_pair(), row, column, panel_rows));
}
// 16 rows of d, from image row `row` and column `column` on, rounded.
template <int N>
__device__ void store_rows(unsigned char* image, const float (&d)[N][4], int row, int column, int panel_rows = kTile) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) store_pair(image, row + 8 * half, column + 8 * n, pack(d[n][2 * half], d[n][2 * half + 1]), panel_rows);
}
template <int N>
__device__ void load_rows(float (&d)[N][4], const unsigned char* image, int row, int column, int panel_rows = kTile) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = unpack(load_pair(image, row + 8 * half, column + 8 * n, panel_rows));
      d[n][2 * half] = pair.x;
      d[n][2 * half + 1] = pair.y;
    }
}

// combine over the four lanes that share a row of a fragment.
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace pathattn::cuda::hopper
