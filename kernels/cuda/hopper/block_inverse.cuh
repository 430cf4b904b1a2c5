// Y = (I + N)^-1 of a block of 64 tokens, N strictly lower triangular, by the block's four warps. A warp has 16 rows of N and of Y in registers, as
// four fragments of 16 x 16 in float32.
//
// On the diagonal by substitution in float32; below it by products whose operands are float16 in two terms, nearly float32's accuracy. With
// M_ij = -Y_ii N_ij: Y_10 = M_10 Y_00, Y_32 = M_32 Y_22, and [Y_i0 Y_i1] = R_i [Y_00 0; Y_10 Y_11] for i = 2, 3 with R_2 = M_2, R_3 = M_3 - Y_32 N_2.
#pragma once

#include "kernels/cuda/hopper/fragments.cuh"

namespace pathattn::cuda::hopper {

using Fragment16 = float[2][4];  // 16 x 16: two of mma's d side by side

// An operand of 16 x 16 in two terms.
struct Terms {
  uint32_t high[4], low[4];
};

// As A.
__device__ inline Terms split(const Fragment16& d) {
  Terms terms;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = d[i / 2][i % 2 * 2], y = d[i / 2][i % 2 * 2 + 1];
    terms.high[i] = pack(x, y);
    const float2 rounded = unpack(terms.high[i]);
    terms.low[i] = pack(x - rounded.x, y - rounded.y);
  }
  return terms;
}
// From A to B.
__device__ inline Terms turn(const Terms& a) {
  Terms b;
#pragma unroll
  for (int i = 0; i < 4; ++i) b.high[i] = transpose_matrix(a.high[i]), b.low[i] = transpose_matrix(a.low[i]);
  return b;
}
__device__ inline void multiply_terms(Fragment16& d, const Terms& a, const Terms& b) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma(d[n], a.low, b.high[2 * n], b.high[2 * n + 1]);
    mma(d[n], a.high, b.low[2 * n], b.low[2 * n + 1]);
    mma(d[n], a.high, b.high[2 * n], b.high[2 * n + 1]);
  }
}

// Places of terms in shared memory: 16 rows of 64 bytes, 16-byte chunks of the high term 0 and 1, of the low 2 and 3, swizzled.
inline constexpr int kTermsBytes = 16 * 64;
__device__ inline uint32_t terms_byte(int row, int chunk) { return row * 64 + ((chunk ^ (row / 2 % 4)) * 16); }
// Rows as they are.
__device__ inline void store_terms(uint32_t place, const Terms& a) {
  const uint32_t to = place + terms_byte(lane_id() % 16, lane_id() / 16);
  store_matrices(to, a.high);
  store_matrices(to ^ 32, a.low);
}
__device__ inline Terms load_terms_b(uint32_t place) {
  Terms b;
  const uint32_t from = place + terms_byte(lane_id() % 16, lane_id() / 16);
  load_matrices_transposed(b.high, from);
  load_matrices_transposed(b.low, from ^ 32);
  return b;
}
// Of a matrix whose columns are the place's rows.
__device__ inline Terms load_turned_terms_a(uint32_t place) {
  Terms a;
  const uint32_t from = place + terms_byte(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2);
  load_matrices_transposed(a.high, from);
  load_matrices_transposed(a.low, from ^ 32);
  return a;
}
__device__ inline Terms load_turned_terms_b(uint32_t place) {
  Terms b;
  const uint32_t from = place + terms_byte(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2);
  load_matrices(b.high, from);
  load_matrices(b.low, from ^ 32);
  return b;
}

// (I - n)^-1 of the warp's 16 x 16, strictly lower triangular, to `place`, turned. The lanes of a half warp have a column each; one half warp stores
// the high terms, the other the low.
__device__ inline void invert_diagonal(unsigned char* place, const Fragment16& n) {
  float* const rows = reinterpret_cast<float*>(place);
  const int column = lane_id() % 16;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *reinterpret_cast<float2*>(rows + (fragment_row() + i % 2 * 8) * 16 + fragment_column() + i / 2 * 8) = {n[i / 2][i % 2 * 2],
                                                                                                            n[i / 2][i % 2 * 2 + 1]};
  __syncwarp();
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = i == column;
#pragma unroll
  for (int j = 0; j < 16; j += 4)
#pragma unroll
    for (int i = j + 1; i < 16; ++i) {
      const float4 of_row = *reinterpret_cast<const float4*>(rows + i * 16 + j);
      y[i] = fmaf(of_row.x, y[j], y[i]);
      if (i > j + 1) y[i] = fmaf(of_row.y, y[j + 1], y[i]);
      if (i > j + 2) y[i] = fmaf(of_row.z, y[j + 2], y[i]);
      if (i > j + 3) y[i] = fmaf(of_row.w, y[j + 3], y[i]);
    }
  __syncwarp();
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t high = pack(y[2 * i], y[2 * i + 1]);
    const float2 rounded = unpack(high);
    pairs[i] = lane_id() < 16 ? high : pack(y[2 * i] - rounded.x, y[2 * i + 1] - rounded.y);
  }
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk)
    *reinterpret_cast<uint4*>(place + terms_byte(column, chunk + lane_id() / 16 * 2)) = {pairs[4 * chunk], pairs[4 * chunk + 1], pairs[4 * chunk + 2],
                                                                                         pairs[4 * chunk + 3]};
  __syncwarp();
}

inline constexpr int kInverseBytes = 7 * kTermsBytes;

// Row i = 0 ... 3 of blocks of Y by warp i; `minus_n` is that of -N, what it holds on and above the diagonal is not looked at. `shared`:
// kInverseBytes of the block's, a multiple of 64; its 128 threads' barrier.
__device__ __forceinline__ void invert(Fragment16 (&y)[4], const Fragment16 (&minus_n)[4], unsigned char* shared, int i, int barrier) {
  const uint32_t places = shared_address(shared);
  const auto diagonal = [&](int j) { return places + j * kTermsBytes; };
  const uint32_t y_10 = places + 4 * kTermsBytes, n_20 = places + 5 * kTermsBytes, n_21 = places + 6 * kTermsBytes;
  Fragment16 on_diagonal;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (j == 0 || j == i) on_diagonal[e / 4][e % 4] = minus_n[j][e / 4][e % 4];
      y[j][e / 4][e % 4] = 0;
    }
  invert_diagonal(shared + i * kTermsBytes, on_diagonal);
  const Terms own = load_turned_terms_a(diagonal(i));
  Fragment16 r[3];
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (j >= i) continue;
    const Terms n = split(minus_n[j]);
    if (i == 2) store_terms(j == 0 ? n_20 : n_21, n);
    clear(r[j]);
    multiply_terms(r[j], own, turn(n));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j != i) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 high = unpack(own.high[e]), low = unpack(own.low[e]);
      y[j][e / 2][e % 2 * 2] = high.x + low.x;
      y[j][e / 2][e % 2 * 2 + 1] = high.y + low.y;
    }
  }
  sync_threads(barrier, 128);
  if (i == 1) {
    multiply_terms(y[0], split(r[0]), load_turned_terms_b(diagonal(0)));
    store_terms(y_10, split(y[0]));
  } else if (i == 3) {
    multiply_terms(y[2], split(r[2]), load_turned_terms_b(diagonal(2)));
    const Terms y_32 = split(y[2]);
    multiply_terms(r[0], y_32, load_terms_b(n_20));
    multiply_terms(r[1], y_32, load_terms_b(n_21));
  }
  sync_threads(barrier, 128);
  if (i >= 2) {
    const Terms left = split(r[0]), right = split(r[1]);
    multiply_terms(y[0], left, load_turned_terms_b(diagonal(0)));
    multiply_terms(y[0], right, load_terms_b(y_10));
    multiply_terms(y[1], right, load_turned_terms_b(diagonal(1)));
  }
}

}  // namespace pathattn::cuda::hopper
