// Backward's last stage, a tile and key head at a time: from the gradients of what `local` made of a tile (queries carried to its start, keys carried
// to its end, G) and from attention inside the tile, the gradients of q, k, v, w, beta.
//
// The tile is one UT transform of 128 tokens here, solved by its two blocks of 64. With L = tril(W K^T, -1), U = (I + N)^-1 B W, X = (I + N)^-1 B L,
// scores A = tril(Q K^T - tril(Q W^T) X), dA their gradient:
//   dQW = -tril(dQ U^T + dA X^T)                            dq = dQ + dA K + dQW W
//   dU  = -tril(Q W^T)^T dQ - W dG                          dX = -tril(Q W^T)^T dA - W dK^T
//   R_W = (I + N)^-T dU,  R_X = tril((I + N)^-T dX, -1)     dN = -tril(R_W U^T + R_X X^T, -1)
//   M   = R_W + R_X K + dN W                                dbeta = rowsum(M * W)
//   dw  = B M + dN^T B W - U dG^T - X dK + dQW^T Q          dk = dK + dA^T Q + R_X^T B W
// Nothing is divided by beta or by G. Products by wgmma on float16 operands, each with a power of two; sums in float32 and in true units.
//
// Four warpgroups; warpgroup (i, j) has the 64 x 64 block (i, j) of a result, so that the code, passed through once a tile, stays small.
#pragma once

#include "kernels/cuda/hopper/block_transform.cuh"
#include "kernels/cuda/hopper/local.cuh"
#include "kernels/cuda/hopper/local_gradients.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"

namespace pathattn::cuda::hopper {

// Shared memory, bytes. Block (0, 1) of X is never used: it holds the first term of C = W_1 W_0^T, kB's the second.
template <int K>
struct AdjointMemory {
  static constexpr int kW = 0, kKeys = kW + kImageBytes<K>, kU = kKeys + kImageBytes<K>, kX = kU + kSquareBytes, kA = kX + kSquareBytes,
                       kB = kA + kSquareBytes, kC = kB + kSquareBytes, kBeta = kC + kSquareBytes, kPowers = kBeta + kTile * 4,
                       kRowSums = kPowers + kTile * 4, kMaxima = kRowSums + 2 * kTile * 4, kFactors = kMaxima + 4 * 16 * 4,
                       kBarrier = kFactors + 4 * 4, kTotal = kBarrier + 8;
};

// A CTA's work on one tile.
template <int K, int V, bool kPath>
struct LocalAdjoint {
  using Memory = AdjointMemory<K>;
  const Call& call;
  const LocalGradients& gradients;
  unsigned char *shared, *scratch;
  Tile tile;
  Unit unit;
  int64_t index;   // of the tile among the batch row's
  int warp, i, j;  // warp of the CTA; block of the warpgroup
  int turn = 0, row_turn = 0;
  uint32_t parity = 0;
  float u_factor = 1, x_factor = 1, key_factor = 1;  // number = factor * stored

  __device__ bool in_keys() const { return kBlock * j < K; }    // the block is one of an image K wide
  __device__ bool in_values() const { return kBlock * j < V; }  // of one V wide
  __device__ bool in_square() const { return j <= i; }          // of a lower triangular square
  __device__ bool is_last() const { return tile.index + 1 == tile.num_tiles; }

  __device__ unsigned char* block(int image, int i, int j) const { return hopper::block(shared + image, i, j); }
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }
  __device__ uint64_t* barrier() const { return reinterpret_cast<uint64_t*>(shared + Memory::kBarrier); }
  __device__ unsigned char* parked_y() const { return scratch; }
  __device__ unsigned char* parked_u() const { return scratch + kSquareBytes; }
  __device__ unsigned char* parked_c() const { return scratch + 2 * kSquareBytes; }
  enum Sum { kDu, kDx, kDw, kDk, kSums };
  __device__ float* sum_of(int sum, int i, int j) const {
    return reinterpret_cast<float*>(scratch + 2 * kSquareBytes + kBlockBytes) + (4 * sum + 2 * i + j) * kSumFloats;
  }
  __device__ float* gate_parts() const { return sum_of(kSums, 0, 0); }  // [10][kTile]: of columns a warp's rows, of rows a block's columns

  // What was written to shared memory is seen by wgmma and bulk copies, of the warpgroup or of all.
  __device__ void settle_group() const {
    fence_async();
    sync_threads(1 + 2 * i + j, 128);
  }
  __device__ void settle() const {
    fence_async();
    __syncthreads();
  }
  // The largest of warps 0-7 and of warps 8-15, after a barrier of all; of the warpgroup; of the two of row `i`.
  __device__ float* publish(float x) {
    float* const maxima = floats(Memory::kMaxima) + 16 * (turn ^= 1);
    x = warp_max(x);
    if (lane_id() == 0) maxima[warp] = x;
    return maxima;
  }
  __device__ static float largest_of_four(const float* maxima) { return fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3])); }
  __device__ static float largest_of_eight(const float* maxima) { return fmaxf(largest_of_four(maxima), largest_of_four(maxima + 4)); }
  __device__ float2 halves_max(float x) {
    const float* const maxima = publish(x);
    __syncthreads();
    return {largest_of_eight(maxima), largest_of_eight(maxima + 8)};
  }
  __device__ float tile_max(float x) {
    const float2 both = halves_max(x);
    return fmaxf(both.x, both.y);
  }
  __device__ float group_max(float x) {
    const float* const maxima = publish(x);
    sync_threads(1 + 2 * i + j, 128);
    return largest_of_four(maxima + warp / 4 * 4);
  }
  __device__ float row_of_groups_max(float x) {
    float* const maxima = floats(Memory::kMaxima) + 16 * (2 + (row_turn ^= 1));
    x = warp_max(x);
    if (lane_id() == 0) maxima[warp] = x;
    sync_threads(5 + i, 256);
    return largest_of_eight(maxima + 8 * i);
  }

  // Keeps columns up to the row's own (kDiagonal) or before it, of a block on the diagonal.
  template <bool kDiagonal>
  __device__ void keep_lower(float (&d)[32]) const {
    for_pairs(d, [&](int r, int c, float& x, float& y) {
      const int last = i == j ? r - !kDiagonal : kBlock;
      if (c > last) x = 0;
      if (c + 1 > last) y = 0;
    });
  }
  __device__ void store(int image, int i, int j, float (&d)[32], float by) const { store_block(shared + image + j * kPanelBytes, i, d, by); }
  __device__ void load(float (&d)[32], int image, int i, int j, float factor) const { load_block(d, shared + image + j * kPanelBytes, i, factor); }
  // A block of halves of pairs, as round_to makes them.
  __device__ void store(int image, const uint32_t (&pairs)[16]) const {
#pragma unroll
    for (int e = 0; e < 16; ++e)
      store_own(shared + image + j * kPanelBytes, kBlock * i + own_row() + e % 2 * 8, e / 2 * 8 + fragment_column(), pairs[e]);
  }
  // 16 rows of a 16-bit input to an image, a warp's; factor_of(their largest number) is the image's.
  template <int D, typename FactorOf>
  __device__ __forceinline__ void load_input(const Tensor& tensor, const Unit& head, int row, int image, FactorOf factor_of) {
    InputRows<D> rows;
    rows.load(tensor, head.b, tile.first(), head.h, row, tile.count);
    const float factor = factor_of(rows.largest(tensor.dtype));
    rows.store(shared + image, row, tensor.dtype, reciprocal_of_power(factor));
  }
  // d *= beta of its row times `by`
  __device__ void scale_rows(float (&d)[32], int i, float by) const {
    const float* beta = floats(Memory::kBeta) + kBlock * i + own_row();
    const float of_row[2] = {beta[0] * by, beta[8] * by};
#pragma unroll
    for (int e = 0; e < 32; ++e) d[e] *= of_row[e / 2 % 2];
  }
  // Sums of scratch are in wgmma's order, four numbers a thread at a time.
  __device__ void write_sum(const float (&d)[32], int sum) const {
    auto* to = reinterpret_cast<float4*>(sum_of(sum, i, j)) + threadIdx.x % 128;
#pragma unroll
    for (int e = 0; e < 32; e += 4) to[e * 32] = {d[e], d[e + 1], d[e + 2], d[e + 3]};
  }
  __device__ void add_sum(float (&d)[32], int sum, int i, int j) const {
    const auto* from = reinterpret_cast<const float4*>(sum_of(sum, i, j)) + threadIdx.x % 128;
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      const float4 x = from[e * 32];
      d[e] += x.x, d[e + 1] += x.y, d[e + 2] += x.z, d[e + 3] += x.w;
    }
  }
  template <bool kFloat32>
  __device__ void write(const Tensor& tensor, const Unit& head, const float (&d)[32]) const {
    const int64_t at = head.b * tensor.batch_stride + (tile.first() + kBlock * i) * tensor.token_stride + head.h * tensor.head_stride + kBlock * j;
    write_block<kFloat32>(tensor, at, d, tile.count - kBlock * i);
  }

  // Bulk copies by one thread between barriers of all; `bytes` are those of all copies that await() ends.
  __device__ void expect(uint32_t bytes) const {
    if (threadIdx.x == 0) arrive_expecting(barrier(), bytes);
  }
  __device__ void fetch(void* to, const void* from, uint32_t bytes) const {
    if (threadIdx.x == 0) copy_bulk(to, from, bytes, barrier());
  }
  __device__ void await() {
    wait(barrier(), parity);
    parity ^= 1;
  }

  // d += this block of: A B, A^T B, A B^T with blocks first ... last along k.
  __device__ void add_blocks(float (&d)[32], int a, int b, int first, int last) const {
#pragma unroll 1
    for (int k = first; k <= last; ++k) accumulate(d, [&](float(&p)[32]) { multiply<0, 1>(p, block(a, i, k), block(b, k, j)); });
  }
  __device__ void add_transposed(float (&d)[32], int a, int b, int first, int last) const {
#pragma unroll 1
    for (int k = first; k <= last; ++k) accumulate(d, [&](float(&p)[32]) { multiply<1, 1>(p, block(a, k, i), block(b, k, j)); });
  }
  __device__ void add_by_transposed(float (&d)[32], int a, int b, int first, int last) const {
#pragma unroll 1
    for (int k = first; k <= last; ++k) accumulate(d, [&](float(&p)[32]) { multiply<0, 0>(p, block(a, i, k), block(b, j, k)); });
  }
  // d += factor * the block of A B, A lower triangular.
  __device__ void add_lower(float (&d)[32], float factor, int a, int b) const {
    float p[32];
    zero(p);
    add_blocks(p, a, b, 0, i);
    add_scaled(d, factor, p);
  }
  // d = -(wide_factor A U^T + square_factor S X^T), S lower triangular as the result is.
  __device__ void set_lower(float (&d)[32], float wide_factor, int a, float square_factor, int square) const {
    float p[32];
    zero(d), zero(p);
    add_by_transposed(d, a, Memory::kU, 0, K / 64 - 1);
    add_by_transposed(p, square, Memory::kX, 0, j);
    scale(d, -wide_factor);
    add_scaled(d, -square_factor, p);
  }

  // Column j of (I + N)^-1 B R, stored in `out`: block 0 of B R / factor stands in `in`, `bottom` is block 1 of R. A square's column 1 has no block
  // 0.
  __device__ __forceinline__ void solve(int in, int out, float (&bottom)[32], float factor, bool has_top) const {
    float d[32];
    const auto times_y = [&](int b) {
      zero(d);
      accumulate(d, [&](float(&p)[32]) {
        multiply<0, 1>(p, block(Memory::kC, b, 1), block(in, b, j));
        multiply<0, 1>(p, block(Memory::kC, b, 0), block(in, b, j));
      });
      store(out, b, j, d, 1.f);
    };
    if (has_top) {
      times_y(0);
      settle_group();
      zero(d);
      accumulate(d, [&](float(&p)[32]) {
        multiply<0, 1>(p, block(Memory::kB, 0, 1), block(out, 0, j));
        multiply<0, 1>(p, block(Memory::kX, 0, 1), block(out, 0, j));
      });
      add_scaled(bottom, -factor, d);
    }
    scale_rows(bottom, 1, reciprocal_of_power(factor));
    store(in, 1, j, bottom, 1.f);
    settle_group();
    times_y(1);
  }

  // Column j of (I + N)^-T of a sum of scratch as an image; its strictly lower part alone for a square. factors: of its two rows of blocks.
  __device__ __forceinline__ void solve_transposed(int image, Sum sum, bool is_square, bool is_there, float* factors) {
    const bool has_top = is_there && !(is_square && j == 1);
    float d[32];
    const auto store_scaled = [&](int b, float largest) {
      const float factor = gradient_factor(largest);
      store(image, b, j, d, reciprocal_of_power(factor));
      return factor;
    };
    const auto times_y = [&](int b, float factor) {
      settle_group();
      zero(d);
      accumulate(d, [&](float(&p)[32]) {
        multiply<1, 1>(p, block(Memory::kC, b, 1), block(image, b, j));
        multiply<1, 1>(p, block(Memory::kC, b, 0), block(image, b, j));
      });
      scale(d, factor);
      if (is_square && b == j) {
        for_pairs(d, [&](int r, int c, float& x, float& y) {
          if (c >= r) x = 0;
          if (c + 1 >= r) y = 0;
        });
      }
      const float result = gradient_factor(row_of_groups_max(largest_of(d)));
      if (b == 1 || has_top) store(image, b, j, d, reciprocal_of_power(result));
      if (threadIdx.x % 256 == 0) factors[b] = result;
    };
    zero(d);
    if (is_there) add_sum(d, sum, 1, j);
    times_y(1, store_scaled(1, group_max(largest_of(d))));
    if (!has_top) {
      row_of_groups_max(0);
      return;
    }
    scale_rows(d, 1, 1.f);
    const float factor = store_scaled(0, group_max(largest_of(d)));
    settle_group();
    zero(d);
    accumulate(d, [&](float(&p)[32]) {
      multiply<1, 1>(p, block(Memory::kB, 0, 1), block(image, 0, j));
      multiply<1, 1>(p, block(Memory::kX, 0, 1), block(image, 0, j));
    });
    scale(d, -factor);
    add_sum(d, sum, 0, j);
    times_y(0, store_scaled(0, group_max(largest_of(d))));
  }

  // W, K; then Y (kC: blocks (b, 0) in its first, (b, 1) in its second term), C = W_1 W_0^T in two terms, U, X.
  __device__ __forceinline__ void transform() {
    float* const beta = floats(Memory::kBeta);
    const int row = warp % 8 * 16;
    if (warp < 8) {
      load_input<K>(call.k, unit, row, Memory::kKeys, [&](float largest) { return key_factor = factor_for(halves_max(largest).x); });
    } else if constexpr (kPath) {
      WRows<K> w;
      w.load(call, unit, tile, row);
      w.store(row, shared + Memory::kW, beta, floats(Memory::kPowers));
      __syncwarp();
      const float2 largest = halves_max(fabsf(beta[row + lane_id() % 16]));
      key_factor = factor_for(largest.x);
    } else {
      key_factor = factor_for(halves_max(0).x);
    }
    settle();
    if constexpr (!kPath) return;
    const float largest_beta = tile_max(lane_id() < 8 ? fabsf(beta[8 * warp + lane_id()]) : 0.f);
    const float w_bound = .5f * sqrtf(static_cast<float>(K)), key_bound = 64.f * sqrtf(static_cast<float>(K));  // lengths of rows of W, K as stored
    u_factor = gradient_factor(largest_beta * w_bound);
    x_factor = gradient_factor(largest_beta * w_bound * key_bound);

    float l[32], d[32];
    zero(l), zero(d);
    const Square square{floats(Memory::kA) + i * kSquareFloats};
    if (in_square()) {
      add_by_transposed(l, Memory::kW, Memory::kKeys, 0, K / 64 - 1);
      add_by_transposed(d, Memory::kW, Memory::kW, 0, K / 64 - 1);
      keep_lower<false>(l);
      for_pairs(d, [&](int r, int c, float x, float y) {
        if (i == j) {
          if (c < r) square.at[r * kSquareStride + c] = beta[kBlock * i + r] * x;
          if (c + 1 < r) square.at[r * kSquareStride + c + 1] = beta[kBlock * i + r] * y;
        } else {
          const uint32_t high = pack(x, y);
          const float2 rounded = unpack(high);
          store_own(shared + Memory::kX, r, kBlock + c, high);
          store_own(shared + Memory::kB, r, kBlock + c, pack(x - rounded.x, y - rounded.y));
        }
      });
    }
    __syncthreads();
    if (j == 0) {
      const int barrier_id = 1 + 2 * i;
      invert_16(square, 16 * (warp % 4));
      sync_threads(barrier_id, 128);
      merge_inverses<16>(square, warp % 4, barrier_id);
      merge_inverses<32>(square, warp % 4, barrier_id);
      for_pairs(d, [&](int r, int c, float, float) {
        const float x = square.y(r, c), y = square.y(r, c + 1);
        const uint32_t high = pack(x, y);
        const float2 rounded = unpack(high);
        store_own(shared + Memory::kC, kBlock * i + r, c, high);
        store_own(shared + Memory::kC, kBlock * i + r, kBlock + c, pack(x - rounded.x, y - rounded.y));
      });
    }
    __syncthreads();
    // Block 0 of B L, and of B W: warpgroups (0, j) go on with U's columns, (1, j) with X's.
    if (i == 0 && j == 0) {
      scale_rows(l, 0, reciprocal_of_power(x_factor));
      store(Memory::kB, 0, 0, l, 1.f);
    }
    if (i == 0 && in_keys()) {
      load(d, Memory::kW, 0, j, 1.f);
      scale_rows(d, 0, reciprocal_of_power(u_factor));
      store(Memory::kA, 0, j, d, 1.f);
      load(l, Memory::kW, 1, j, 1.f);
    }
    settle();
    if (i == 1 || in_keys())
      solve(i == 0 ? Memory::kA : Memory::kB, i == 0 ? Memory::kU : Memory::kX, l, i == 0 ? u_factor : x_factor, i == 0 || j == 0);
    x_factor *= key_factor;
    settle();
    if (threadIdx.x == 0) {
      store_bulk(parked_y(), shared + Memory::kC, kSquareBytes);
      store_bulk(parked_u(), shared + Memory::kU, kImageBytes<K>);
      store_bulk(parked_c(), block(Memory::kB, 0, 1), kBlockBytes);
      commit_bulk();
      wait_bulk_written();
    }
    __syncthreads();
  }

  // Sums that heads add to: dU = -W dG, dX = -W dK^T, dW = -U dG^T - X dK, dK.
  __device__ __forceinline__ void begin_sums() {
    float d[32];
    zero(d);
    if (!is_last() && in_keys()) add_block(d, gradients.dkeys + slot(call, unit.local, index) * kTile * K, i, j, K, kTile);
    if (in_keys()) write_sum(d, kDk);
    if constexpr (!kPath) return;
    if (is_last()) {
      zero(d);
      for (int sum : {kDu, kDx, kDw}) write_sum(d, sum);
      return;
    }
    const float dkey_factor = gradient_factor(tile_max(largest_of(d)));
    if (in_keys()) store(Memory::kB, i, j, d, reciprocal_of_power(dkey_factor));
    zero(d);
    const bool in_matrix = kBlock * i < K && in_keys();
    if (in_matrix && tile.index > 0) add_block(d, gradients.dmatrices + matrix_slot(call, unit.local, index, 0) * K * K, i, j, K, kTile);
    const float dg_factor = gradient_factor(tile_max(largest_of(d)));
    if (in_matrix) store(Memory::kA, i, j, d, reciprocal_of_power(dg_factor));
    settle();
    if (in_keys()) {
      zero(d);
      add_blocks(d, Memory::kW, Memory::kA, 0, K / 64 - 1);
      scale(d, -dg_factor);
      write_sum(d, kDu);
      zero(d);
      add_by_transposed(d, Memory::kU, Memory::kA, 0, K / 64 - 1);
      scale(d, -u_factor * dg_factor);
      add_lower(d, -x_factor * dkey_factor, Memory::kX, Memory::kB);
      write_sum(d, kDw);
    }
    if (in_square()) {
      zero(d);
      add_by_transposed(d, Memory::kW, Memory::kB, 0, K / 64 - 1);
      scale(d, -dkey_factor);
      write_sum(d, kDx);
    }
    __syncthreads();
  }

  // Weights from raw scores.
  __device__ __forceinline__ void weigh(float (&s)[32], const Unit& head, int64_t gate_slot, float score_factor) const {
    const int row = kBlock * i + own_row(), column = kBlock * j + fragment_column();
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      lse[half] = row + 8 * half < tile.count ? kLog2E * call.lse.at(head.b, tile.first() + row + 8 * half, head.h) : 0.f;
    scale(s, score_factor);
    if (call.at.gate_prefix) {
      const float2* prefix = call.at.gate_prefix + gate_slot;
      const float2 of_row[2] = {prefix[row], prefix[row + 8]};
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        const float2 of_column = prefix[column + e / 4 * 8 + e % 2], r = of_row[e / 2 % 2];
        s[e] += (r.x - of_column.x) + (r.y - of_column.y);
      }
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int half = e / 2 % 2, last = row + 8 * half < tile.count ? row + 8 * half : -1;
      s[e] = column + e / 4 * 8 + e % 2 <= last ? exp2_fast(s[e] - lse[half]) : 0.f;
    }
  }

  // Sums of dS over rows less over columns.
  __device__ __forceinline__ void sum_gate(const float (&ds)[32], float* out) const {
    float rows[2] = {0, 0};
    float *const columns = gate_parts(), *const of_rows = columns + 8 * kTile;
#pragma unroll
    for (int e = 0; e < 32; e += 2) rows[e / 2 % 2] += ds[e] + ds[e + 1];
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      float x = ds[e] + ds[e + 2], y = ds[e + 1] + ds[e + 3];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, step);
        y += __shfl_xor_sync(0xffffffffu, y, step);
      }
      if (lane_id() < 4)
        *reinterpret_cast<float2*>(columns + (4 * i + warp % 4) * kTile + kBlock * j + 2 * e + fragment_column()) = make_float2(x, y);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum(rows[half]);
      if (lane_id() % 4 == 0) of_rows[j * kTile + kBlock * i + own_row() + 8 * half] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= kTile) return;
    float sum = of_rows[threadIdx.x] + of_rows[kTile + threadIdx.x];
    for (int part = 0; part < 8; ++part) sum -= columns[part * kTile + threadIdx.x];
    out[threadIdx.x] = sum;
  }

  // One query head: dq, and its part of every sum.
  __device__ __forceinline__ void add_head(int member) {
    const int64_t query = unit.local * call.group + member, at_query = slot(call, query, index);
    const Unit head = query_unit(call, query);
    const bool restore = kPath && member > 0;
    expect(kImageBytes<V> + (restore ? kImageBytes<K> : 0));
    fetch(shared + Memory::kB, gradients.d_out + at_query * kImageBytes<V>, kImageBytes<V>);
    if (restore) fetch(shared + Memory::kU, parked_u(), kImageBytes<K>);
    const int row = warp % 8 * 16;
    float query_factor, value_factor;
    const auto set_factors = [&](float largest) {
      const float2 both = halves_max(largest);
      query_factor = factor_for(both.x), value_factor = factor_for(both.y);
    };
    InputRows<V> values;  // of warps 8-15
    if (warp < 8) {
      load_input<K>(call.q, head, row, Memory::kC, [&](float largest) {
        set_factors(largest);
        return query_factor;
      });
    } else {
      values.load(call.v, unit.b, tile.first(), unit.h, row, tile.count);
      set_factors(values.largest(call.v.dtype));
    }
    const float d_out_factor = gradients.d_out_factors[at_query];
    settle();

    float p[32], ds[32];
    uint32_t qw[16], pairs[16];
    float qw_factor = 1;
    zero(p), zero(ds);
    if constexpr (kPath) {
      if (in_square()) {
        add_by_transposed(p, Memory::kC, Memory::kW, 0, K / 64 - 1);
        keep_lower<true>(p);
      }
      qw_factor = gradient_factor(tile_max(largest_of(p)));
      round_to(qw, p, reciprocal_of_power(qw_factor));
      store(Memory::kA, qw);
      settle();
      zero(p);
      if (in_square()) {
        add_blocks(p, Memory::kA, Memory::kX, j, i);
        scale(p, -qw_factor * x_factor * reciprocal_of_power(key_factor));
      }
    }
    if (in_square()) add_by_transposed(p, Memory::kC, Memory::kKeys, 0, K / 64 - 1);
    __syncthreads();
    if (warp >= 8) values.store(shared + Memory::kA, row, call.v.dtype, reciprocal_of_power(value_factor));
    weigh(p, head, at_query * kTile, kLog2E * call.scale * query_factor * key_factor);
    settle();
    await();
    if (in_square()) {
      add_by_transposed(ds, Memory::kB, Memory::kA, 0, V / 64 - 1);
      scale(ds, d_out_factor * value_factor);
      const float* delta = gradients.delta + at_query * kTile + kBlock * i + own_row();
      const float of_row[2] = {delta[0], delta[8]};
#pragma unroll
      for (int e = 0; e < 32; ++e) ds[e] = p[e] == 0.f ? 0.f : p[e] * (ds[e] - of_row[e / 2 % 2]);
    }
    if (gradients.gate_sums) sum_gate(ds, gradients.gate_sums + at_query * kTile);
    const float ds_factor = gradient_factor(tile_max(fabsf(call.scale) * largest_of(ds)));

    // Every warpgroup is done with V: P in its place.
    round_to(pairs, p, 1.f);
    store(Memory::kA, pairs);
    round_to(pairs, ds, call.scale * reciprocal_of_power(ds_factor));
    settle();
    float d[32];
    if (in_values()) {
      float* const partial = gradients.dvalues + slot(call, unit.local, index) * kTile * V;
      zero(d);
      add_transposed(d, Memory::kA, Memory::kB, i, 1);
      scale(d, d_out_factor);
      if (!is_last() || member > 0) add_block(d, partial, i, j, V, kTile);
      if (member + 1 == call.group)
        write<false>(gradients.dv, unit, d);
      else
        for_pairs(d, [&](int r, int c, float x, float y) {
          __stcg(reinterpret_cast<float2*>(partial + (kBlock * i + r) * V + kBlock * j + c), make_float2(x, y));
        });
    }
    zero(d);
    if (in_keys() && tile.index > 0) add_block(d, gradients.dqueries + at_query * kTile * K, i, j, K, tile.count);
    const float dquery_factor = gradient_factor(tile_max(largest_of(d)));  // every warpgroup is done with P and dO
    store(Memory::kA, pairs);
    if (in_keys()) store(Memory::kB, i, j, d, reciprocal_of_power(dquery_factor));
    settle();

    float dqw_factor = 1;
    if constexpr (kPath) {
      zero(p);
      if (in_square()) {
        set_lower(p, dquery_factor * u_factor, Memory::kB, ds_factor * x_factor, Memory::kA);
        keep_lower<true>(p);
      }
      dqw_factor = gradient_factor(tile_max(largest_of(p)));  // every warpgroup is done with U
      round_to(pairs, p, reciprocal_of_power(dqw_factor));
      store(Memory::kU, pairs);
      settle();
    }
    const auto add_to = [&](Sum sum, float factor, int a, int b) {
      zero(d);
      add_transposed(d, a, b, i, 1);
      scale(d, factor);
      add_sum(d, sum, i, j);
      write_sum(d, sum);
    };
    if (in_keys()) {
      load(d, Memory::kB, i, j, dquery_factor);
      add_lower(d, ds_factor * key_factor, Memory::kA, Memory::kKeys);
      if constexpr (kPath) add_lower(d, dqw_factor, Memory::kU, Memory::kW);
      write<false>(gradients.dq, head, d);
      add_to(kDk, ds_factor * query_factor, Memory::kA, Memory::kC);
      if constexpr (kPath) add_to(kDw, dqw_factor * query_factor, Memory::kU, Memory::kC);
    }
    if constexpr (kPath) {
      __syncthreads();
      store(Memory::kC, qw);
      settle();
      const float factor = -qw_factor * query_factor;
      if (in_keys()) add_to(kDu, factor * dquery_factor, Memory::kC, Memory::kB);
      if (in_square()) add_to(kDx, factor * ds_factor, Memory::kC, Memory::kA);
    }
    settle();
  }

  // R_W, R_X, dN and what follows from them: dk, dw, dbeta.
  __device__ __forceinline__ void finish() {
    float d[32];
    zero(d);
    if constexpr (kPath) {
      expect(kSquareBytes + kImageBytes<K> + kBlockBytes);
      fetch(shared + Memory::kC, parked_y(), kSquareBytes);
      fetch(shared + Memory::kU, parked_u(), kImageBytes<K>);
      fetch(block(Memory::kB, 0, 1), parked_c(), kBlockBytes);
      await();
      float* const rw_factors = floats(Memory::kFactors);
      float* const rx_factors = rw_factors + 2;
      solve_transposed(i == 0 ? Memory::kA : Memory::kB, i == 0 ? kDu : kDx, i == 1, i == 1 || in_keys(), i == 0 ? rw_factors : rx_factors);
      settle();
      const float rw_factor = rw_factors[i], rx_factor = rx_factors[i];
      if (in_square()) {
        set_lower(d, rw_factor * u_factor, Memory::kA, rx_factor * x_factor, Memory::kB);
        keep_lower<false>(d);
      }
      const float dn_factor = gradient_factor(tile_max(largest_of(d)));
      store(Memory::kC, i, j, d, reciprocal_of_power(dn_factor));
      settle();
      if (in_keys()) {
        load(d, Memory::kA, i, j, rw_factor);
        add_lower(d, rx_factor * key_factor, Memory::kB, Memory::kKeys);
        add_lower(d, dn_factor, Memory::kC, Memory::kW);
      }
      __syncthreads();
      if (in_keys()) sum_dbeta_and_scale_w(d);
      settle();
      if (threadIdx.x < tile.count) {
        const float *sums = floats(Memory::kRowSums) + threadIdx.x, power = floats(Memory::kPowers)[threadIdx.x];
        gradients.dbeta.set(unit.b, tile.first() + threadIdx.x, unit.h, 0, (K > kBlock ? sums[0] + sums[kTile] : sums[0]) * power * power);
      }
      if (in_keys()) {
        scale_rows(d, i, 1.f);
        add_sum(d, kDw, i, j);
        {
          float p[32];
          zero(p);
          add_transposed(p, Memory::kC, Memory::kW, i, 1);
          add_scaled(d, dn_factor * u_factor, p);
        }
        const float* powers = floats(Memory::kPowers) + kBlock * i + own_row();
        const float by[2] = {reciprocal_of_power(powers[0]), reciprocal_of_power(powers[8])};
#pragma unroll
        for (int e = 0; e < 32; ++e) d[e] *= by[e / 2 % 2];
        write<true>(gradients.dw, unit, d);
        zero(d);
#pragma unroll 1
        for (int k = i; k < 2; ++k) {
          float p[32];
          zero(p);
          add_transposed(p, Memory::kB, Memory::kW, k, k);
          add_scaled(d, rx_factors[k] * u_factor, p);
        }
      }
    }
    if (in_keys()) {
      add_sum(d, kDk, i, j);
      write<false>(gradients.dk, unit, d);
    }
    settle();
  }

  // This block's part of dbeta = rowsum(M * W); then its W becomes B W / u_factor.
  __device__ __forceinline__ void sum_dbeta_and_scale_w(float (&m)[32]) const {
    const float* beta = floats(Memory::kBeta) + kBlock * i + own_row();
    const float by = reciprocal_of_power(u_factor), of_row[2] = {beta[0] * by, beta[8] * by};
    float w[32], sums[2] = {0, 0};
    load(w, Memory::kW, i, j, 1.f);
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      sums[e / 2 % 2] = fmaf(m[e], w[e], sums[e / 2 % 2]);
      w[e] *= of_row[e / 2 % 2];
    }
    store(Memory::kW, i, j, w, 1.f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum(sums[half]);
      if (lane_id() % 4 == 0) floats(Memory::kRowSums)[j * kTile + kBlock * i + own_row() + 8 * half] = sum;
    }
  }
};

// A CTA takes every gridDim.x-th tile.
template <int K, int V, bool kPath>
__global__ void __launch_bounds__(kAdjointThreads, 1)
    differentiate_locally(const __grid_constant__ Call call, const __grid_constant__ LocalGradients gradients) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Memory = AdjointMemory<K>;
  auto* const barrier = reinterpret_cast<uint64_t*>(shared + Memory::kBarrier);
  if (threadIdx.x == 0) {
    init_barrier(barrier, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const int num_tiles = *call.at.num_tiles, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  uint32_t parity = 0;
  for (int64_t item = blockIdx.x; item < int64_t{num_tiles} * gradients.num_units; item += gridDim.x) {
    const int64_t index = item % num_tiles;
    LocalAdjoint<K, V, kPath> adjoint{call,
                                      gradients,
                                      shared,
                                      gradients.scratch + int64_t{blockIdx.x} * kAdjointScratchBytes,
                                      call.at.tiles[index],
                                      key_unit(call, item / num_tiles),
                                      index,
                                      warp,
                                      warp / 8,
                                      warp / 4 % 2};
    adjoint.parity = parity;
    adjoint.transform();
    adjoint.begin_sums();
    for (int member = 0; member < call.group; ++member) adjoint.add_head(member);
    adjoint.finish();
    parity = adjoint.parity;
  }
}

}  // namespace pathattn::cuda::hopper
