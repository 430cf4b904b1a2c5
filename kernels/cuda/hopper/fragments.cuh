// A warp's fragments: 16 rows of a product or of an operand in its registers, and where they stand in shared memory (layout.cuh's images).
#pragma once

#include "kernels/cuda/hopper/layout.cuh"
#include "kernels/cuda/hopper/ptx.cuh"

namespace pathattn::cuda::hopper {

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
// Of a d fragment: register i holds row fragment_row() + 8 (i / 2), column fragment_column() + i % 2 of its 16 x 8.
__device__ inline int fragment_row() { return lane_id() / 4; }
__device__ inline int fragment_column() { return lane_id() % 4 * 2; }

// Byte from the start of 16 rows and 16 columns of an image at which a lane of ldmatrix begins, before `at` moves it by whole 8s of rows and columns:
// matrices one above the other first.
__device__ inline uint32_t lane_byte_down() {
  const int lane = lane_id();
  return lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
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

template <int N>
__device__ void clear(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) d[n][i] = 0;
}

// The pair of a d fragment's row (0 or 8 below fragment_row()) whose 8 columns begin at `column`, of 16 rows from `row` on.
__device__ inline uint32_t load_pair(const unsigned char* image, int row, int column, int panel_rows = kTile) {
  return *reinterpret_cast<const uint32_t*>(image + at(lane_byte_of_pair(), row, column, panel_rows));
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
