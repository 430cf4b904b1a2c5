// The first stage, a CTA a tile and key head: the UT transform of the tile's two blocks, keys carried to the tile's end, G of the tile, and for each
// query head the attention inside the tile and the queries carried to the tile's start. A warpgroup a block, products by wgmma. Backward wants what
// lies between the two blocks as well, and no attention.
#pragma once

#include "kernels/cuda/hopper/block_inverse.cuh"
#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/input.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"

namespace pathattn::cuda::hopper {

inline constexpr int kLocalThreads = 256;  // warpgroup 0: block 0, the first 64 rows; warpgroup 1: block 1

// Shared memory, bytes: images of the tile's rows. A block's inverse is made where its rows of U will be. X, 64 x 64 a block, takes the place of L.
template <int K, int V>
struct LocalMemory {
  static constexpr int kW = 0, kKeys = kW + kImageBytes<K>, kValues = kKeys + kImageBytes<K>, kU = kValues + kImageBytes<V>;
  static constexpr int kRows = kU + kImageBytes<K>;  // queries on their way; in the end whatever a warp sends to the workspace
  static constexpr int kX = kRows + kImageBytes<K>;
  // W of block 0 carried to the tile's end, when nobody reads block 0's X any more.
  static constexpr int kCarriedW = K == 64 ? kX : kX + 2 * kBlockBytes;
  static constexpr int kBeta = kX + 2 * kBlockBytes + (K == 64 ? 0 : K / 64 * kBlockBytes);
  static constexpr int kMaxima = kBeta + kTile * 4, kTotal = kMaxima + 4 * 8 * 4;
  static constexpr int kStage = kTotal, kStageBytes = 16 * 128, kBackwardTotal = kStage + 8 * kStageBytes;  // a warp's 16 rows on their way out
  static_assert(kInverseBytes <= kBlockBytes);
};

// The power of two that brings numbers up to `largest` near 32: far from float16's limits, with room to grow by a sum over a row.
__device__ inline float factor_for(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  if (largest == 0 || exponent > 127) return 1.f;
  return __uint_as_float(static_cast<uint32_t>(max(exponent - 5, -120) + 127) << 23);
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// 16 bytes a lane and load, kRows rows further down each time, zero for rows from `count` on; `first` is the lane's first row, `row` the warp's.
template <int kRows, int N, typename Vector, typename Element>
__device__ void load_rows(Vector (&x)[N], const Element* at, int64_t stride, int first, int row, int count) {
  const auto read = [&](int i) { return *reinterpret_cast<const Vector*>(at + i * (kRows * stride)); };
  if (row + 16 <= count) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = read(i);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = first + i * kRows < count ? read(i) : Vector{0, 0, 0, 0};
  }
}
// The byte of an image `rows` below one whose row, modulo 8, has no bit of theirs.
__device__ inline uint32_t byte_further_down(uint32_t byte, int rows) { return (byte ^ (rows % 8 * 16)) + rows * 128; }

// 16 rows of a 16-bit tensor in a warp's registers, 16 bytes a lane: rows r of the tile, zero from `count` on.
template <int D>
struct InputRows {
  static constexpr int kChunks = D / 8, kLoads = 16 * kChunks / 32, kRows = 32 / kChunks;  // kRows at a time
  uint4 x[kLoads];

  __device__ void load(const Tensor& tensor, int64_t b, int64_t token, int h, int row, int count) {
    const int first = row + lane_id() / kChunks;
    const auto* at = static_cast<const uint16_t*>(tensor.data) + b * tensor.batch_stride + h * tensor.head_stride +
                     (token + first) * tensor.token_stride + lane_id() % kChunks * 8;
    load_rows<kRows>(x, at, tensor.token_stride, first, row, count);
  }
  __device__ float largest(DType dtype) const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      for (uint32_t pair : {x[i].x, x[i].y, x[i].z, x[i].w}) most = dtype == DType::kFloat16 ? larger_half(most, pair) : larger_bfloat16(most, pair);
    const float2 two = unpack_input(most, dtype);
    return warp_max(fmaxf(fabsf(two.x), fabsf(two.y)));
  }
  __device__ void store(unsigned char* image, int row, DType dtype, float by) const {
    const uint32_t first = image_byte(row + lane_id() / kChunks, lane_id() % kChunks * 8);
    const auto store_as = [&](auto unpack_pair) {
      const auto scaled = [&](uint32_t pair) {
        const float2 two = unpack_pair(pair);
        return pack(two.x * by, two.y * by);
      };
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        *reinterpret_cast<uint4*>(image + byte_further_down(first, i * kRows)) = {scaled(x[i].x), scaled(x[i].y), scaled(x[i].z), scaled(x[i].w)};
    };
    if (dtype == DType::kFloat16)
      store_as([](uint32_t pair) { return unpack_input(pair, DType::kFloat16); });
    else
      store_as([](uint32_t pair) { return unpack_input(pair, DType::kBFloat16); });
  }
};

// 16 rows of w, which become float16 each with a power of two of its own that brings its largest number to [1/4, 1/2): beta takes it back.
template <int K>
struct WRows {
  static constexpr int kChunks = K / 4, kLoads = 16 * kChunks / 32, kRows = 32 / kChunks;  // kRows at a time
  float4 x[kLoads];
  float beta;  // of own_row(), lanes with owns_row()

  __device__ static bool owns_row() { return lane_id() % kChunks < kLoads; }
  __device__ static int own_row() { return lane_id() % kChunks * kRows + lane_id() / kChunks; }
  __device__ void load(const Call& call, const Unit& unit, const Tile& tile, int row) {
    const Tensor& w = call.w;
    const int first = row + lane_id() / kChunks;
    const auto* at = static_cast<const float*>(w.data) + unit.b * w.batch_stride + unit.h * w.head_stride + (tile.first() + first) * w.token_stride +
                     lane_id() % kChunks * 4;
    load_rows<kRows>(x, at, w.token_stride, first, row, tile.count);
    const int r = row + own_row();
    beta = owns_row() && r < tile.count ? call.beta.at(unit.b, tile.first() + r, unit.h) : 0.f;
  }
  __device__ void store(int row, unsigned char* image, float* betas, float* powers = nullptr) const {
    // A float's upper half has its exponent: two rows' numbers go through a shuffle together.
    uint32_t largest[kLoads / 2];
    const auto largest_of = [](const float4& of) { return __float_as_uint(fmaxf(fmaxf(fabsf(of.x), fabsf(of.y)), fmaxf(fabsf(of.z), fabsf(of.w)))); };
#pragma unroll
    for (int i = 0; i < kLoads / 2; ++i) largest[i] = __byte_perm(largest_of(x[2 * i]), largest_of(x[2 * i + 1]), 0x7632);
#pragma unroll
    for (int step = kChunks / 2; step > 0; step /= 2)
#pragma unroll
      for (int i = 0; i < kLoads / 2; ++i) largest[i] = __vmaxu2(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], step));
    float own_factor = 1;
    const uint32_t first = image_byte(row + lane_id() / kChunks, lane_id() % kChunks * 4);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float most = __uint_as_float(i % 2 ? largest[i / 2] & 0xffff0000u : largest[i / 2] << 16);
      const float factor = most == 0 ? 1 : 128 * factor_for(most);  // a zero row's beta must not outweigh others'
      const float by = reciprocal_of_power(factor);
      *reinterpret_cast<uint2*>(image + byte_further_down(first, i * kRows)) = {pack(x[i].x * by, x[i].y * by), pack(x[i].z * by, x[i].w * by)};
      if (lane_id() % kChunks == i) own_factor = factor;
    }
    if (owns_row()) betas[row + own_row()] = beta * own_factor * own_factor;
    if (powers && owns_row()) powers[row + own_row()] = own_factor;
  }
};

__device__ inline uint32_t negated(uint32_t pair) { return pair ^ 0x80008000u; }
// Which halves of register i of a 16 x 16 A lie on or below the diagonal, as a mask.
__device__ inline uint32_t up_to_diagonal(int i) {
  const int row = fragment_row() + i % 2 * 8, column = fragment_column() + i / 2 * 8;
  return (column <= row ? 0xffffu : 0u) | (column + 1 <= row ? 0xffff0000u : 0u);
}

// A warp's 16 rows of a product of 64 rows, rounded, as A: 16 columns an entry.
template <int N>
__device__ void round_rows(uint32_t (&a)[N / 8][4], const float (&d)[N]) {
#pragma unroll
  for (int k = 0; k < N / 8; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = pack(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
}
// What rounding d to `a` left, rounded in turn.
template <int N>
__device__ void round_rest(uint32_t (&rest)[N / 8][4], const float (&d)[N], const uint32_t (&a)[N / 8][4]) {
#pragma unroll
  for (int k = 0; k < N / 8; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 rounded = unpack(a[k][i]);
      rest[k][i] = pack(d[8 * k + 2 * i] - rounded.x, d[8 * k + 2 * i + 1] - rounded.y);
    }
}
// To image row `row` and the next 15, and back.
template <int N>
__device__ void write_rounded(unsigned char* image, const uint32_t (&a)[N][4], int row, int panel_rows = kTile) {
  const uint32_t lane_byte = opaque(lane_byte_down());
#pragma unroll
  for (int k = 0; k < N; ++k) store_matrices(shared_address(image) + at(lane_byte, row, 16 * k, panel_rows), a[k]);
}
template <int N>
__device__ void write_rows(unsigned char* image, const float (&d)[N], int row, int panel_rows = kTile) {
  uint32_t a[N / 8][4];
  round_rows(a, d);
  write_rounded(image, a, row, panel_rows);
}
template <int N>
__device__ void read_rows(float (&d)[N], const unsigned char* image, int row) {
  const uint32_t lane_byte = opaque(lane_byte_down());
#pragma unroll
  for (int k = 0; k < N / 8; ++k) {
    uint32_t a[4];
    load_matrices(a, shared_address(image) + at(lane_byte, row, 16 * k, kTile));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack(a[i]);
      d[8 * k + 2 * i] = pair.x, d[8 * k + 2 * i + 1] = pair.y;
    }
  }
}

// d = A B^T over the K columns of 64 rows of images.
template <int K>
__device__ void multiply_by_rows(float (&d)[32], const unsigned char* a, const unsigned char* b) {
  const uint64_t left = descriptor(a), right = descriptor(b);
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    const uint32_t by = k / 4 * kPanelBytes + k % 4 * 32;
    if (k == 0)
      wgmma_first<0, 0>(d, left, right);
    else
      wgmma<0, 0>(d, advance(left, by), advance(right, by), true);
  }
}
// d (+)= A B, A in registers, B 64 rows of an image.
template <bool kAdd, int N>
__device__ void multiply_rows(float (&d)[N], const uint32_t (&a)[4][4], const unsigned char* b) {
  const uint64_t right = descriptor(b, kPanelBytes);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (!kAdd && k == 0)
      wgmma_first<1>(d, a[k], right);
    else
      wgmma<1>(d, a[k], advance(right, k * 2048), true);
  }
}
// The same with A in two terms.
template <int N>
__device__ void multiply_rows(float (&d)[N], const uint32_t (&high)[4][4], const uint32_t (&low)[4][4], const unsigned char* b) {
  const uint64_t right = descriptor(b, kPanelBytes);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k == 0)
      wgmma_first<1>(d, low[k], right);
    else
      wgmma<1>(d, low[k], advance(right, k * 2048), true);
    wgmma<1>(d, high[k], advance(right, k * 2048), true);
  }
}

// What a warp's 16 rows of queries have gathered.
template <int V>
struct Gathered {
  float out[V / 2];
  float largest[2], sum[2];  // base-2 scores' maximum, sum of exp2(score - maximum); of rows fragment_row() and + 8
};

template <int K, int V, bool kPath, bool kGated, bool kBackward>
struct Local {
  using Memory = LocalMemory<K, V>;
  const Call& call;
  const Tile& tile;
  unsigned char* shared;
  int warp, block, row;  // row: the warp's first in the tile

  __device__ Local(const Call& call, const Tile& tile, unsigned char* shared)
      : call(call), tile(tile), shared(shared), warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)), block(warp / 4), row(16 * warp) {}

  __device__ unsigned char* rows(int image, int block) const { return shared + image + block * kBlockBytes; }
  __device__ unsigned char* x() const { return shared + Memory::kX + block * kBlockBytes; }
  __device__ const float* betas() const { return reinterpret_cast<const float*>(shared + Memory::kBeta) + block * kBlock; }
  __device__ void sync_block() const { sync_threads(1 + block, 128); }
  __device__ void settle_block() const {
    fence_async();
    sync_block();
  }

  // 16 rows of 64 columns to a panel of the workspace.
  __device__ __forceinline__ void send_panel_rows(unsigned char* to, const uint32_t (&a)[4][4]) const {
    unsigned char* const stage = shared + Memory::kStage + warp * Memory::kStageBytes;
    if (lane_id() == 0) wait_bulk_read();
    __syncwarp();
    write_rounded(stage, a, 0);
    fence_async();
    __syncwarp();
    if (lane_id() != 0) return;
    store_bulk(to, stage, Memory::kStageBytes);
    commit_bulk();
  }
  // The warp's rows, rounded, to an image of the workspace whose rows of the warp begin at `to`; then they are multiplied by their factor.
  template <int N>
  __device__ __forceinline__ void send_and_scale(unsigned char* to, float (&d)[N], float factor) const {
#pragma unroll
    for (int panel = 0; panel < N / 32; ++panel) {
      uint32_t a[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = pack(d[32 * panel + 2 * i], d[32 * panel + 2 * i + 1]);
      send_panel_rows(to + panel * kPanelBytes, a);
    }
#pragma unroll
    for (float& x : d) x *= factor;
  }

  // From W and K in shared memory: -U, -X, and in place of K the keys carried to their block's end. In backward (I + N)^-1 goes to the workspace.
  __device__ __forceinline__ void transform(int64_t slot) const {
    const int in_block = row % kBlock;
    Fragment16 y[4];
    {
      float d[32], l[32];
      wgmma_fence();
      multiply_by_rows<K>(d, rows(Memory::kW, block), rows(Memory::kW, block));
      multiply_by_rows<K>(l, rows(Memory::kW, block), rows(Memory::kKeys, block));
      wgmma_commit();
      wgmma_wait<0>();
      hold(d), hold(l);
      const float minus_beta[2] = {-betas()[in_block + fragment_row()], -betas()[in_block + fragment_row() + 8]};
      Fragment16 minus_n[4];
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int r = in_block + fragment_row() + i / 2 % 2 * 8, c = i / 4 * 8 + fragment_column() + i % 2;
        if (c >= r) l[i] = 0;
        minus_n[i / 8][i / 4 % 2][i % 4] = d[i] * minus_beta[i / 2 % 2];
      }
      write_rows(x(), l, in_block, kBlock);
      fence_async();
      invert(y, minus_n, rows(Memory::kU, block), warp % 4, 1 + block);
    }
    if constexpr (kBackward) {
      uint32_t high[4][4] = {}, low[4][4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (16 * k > in_block) continue;
        const Terms terms = split(y[k]);
#pragma unroll
        for (int i = 0; i < 4; ++i) high[k][i] = terms.high[i], low[k][i] = terms.low[i];
      }
      unsigned char* const to = call.at.transform_y + (2 * slot + block) * (2 * kBlockBytes) + in_block * 128;
      send_panel_rows(to, high);
      send_panel_rows(to + kBlockBytes, low);
    }
    // -T = -Y B in two terms of float16: the only ill-conditioned factor. For gradients it keeps its digits where beta, of short w, is small.
    float factor = 1;
    if constexpr (kBackward) {
      factor = 32 * factor_for(warp_max(fmaxf(fabsf(betas()[lane_id()]), fabsf(betas()[32 + lane_id()]))));
      if (threadIdx.x % 128 == 0) call.at.transform_factors[2 * slot + block] = factor;
    }
    const float by = reciprocal_of_power(factor);
    uint32_t high[4][4] = {}, low[4][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (16 * k > in_block) continue;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 beta = *reinterpret_cast<const float2*>(betas() + 16 * k + 8 * n + fragment_column());
#pragma unroll
        for (int i = 0; i < 4; ++i) y[k][n][i] *= (i % 2 ? -beta.y : -beta.x) * by;
      }
      const Terms terms = split(y[k]);
#pragma unroll
      for (int i = 0; i < 4; ++i) high[k][i] = terms.high[i], low[k][i] = terms.low[i];
    }
    {
      uint32_t minus_x[4][4];
      {
        float d[32];
        wgmma_fence();
        multiply_rows(d, high, low, x());
        wgmma_commit();
        wgmma_wait<0>();
        hold(d);
        if constexpr (kBackward) send_and_scale(call.at.transform_x + (2 * slot + block) * kBlockBytes + in_block * 128, d, factor);
        round_rows(minus_x, d);
      }
      float u[K / 2];
      wgmma_fence();
      multiply_rows(u, high, low, rows(Memory::kW, block));
      wgmma_commit();
      wgmma_wait<0>();
      hold(u);
      if constexpr (kBackward) send_and_scale(call.at.transform_u + slot * kImageBytes<K> + row * 128, u, factor);
      sync_block();  // all have read L and the inverse
      write_rounded(x(), minus_x, in_block, kBlock);
      write_rows(shared + Memory::kU, u, row);
      settle_block();
    }
    float keys[K / 2];
    read_rows(keys, shared + Memory::kKeys, row);
    accumulate(keys, [&](float(&d)[K / 2]) { multiply<1, 1>(d, x(), rows(Memory::kW, block)); });
    write_rows(shared + Memory::kKeys, keys, row);
    fence_async();
  }

  // d takes the place of the warp's rows of queries, once these have gone where they were sent and the block has read them.
  template <int N>
  __device__ __forceinline__ void replace_rows(const float (&d)[N]) const {
    if (lane_id() == 0) wait_bulk_read();
    sync_block();
    write_rows(shared + Memory::kRows, d, row);
    fence_async();
  }
  // The warp's rows of queries, or what took their place, to rows of an image of the workspace.
  __device__ __forceinline__ void send_rows(unsigned char* image, int to_row, int panel_rows) const {
    __syncwarp();
    if (lane_id() != 0) return;
#pragma unroll
    for (int panel = 0; panel < K / 64; ++panel)
      store_bulk(image + (panel * panel_rows + to_row) * 128, shared + Memory::kRows + panel * kPanelBytes + row * 128, 16 * 128);
    commit_bulk();
  }

  // The warp's rows of block 0 of an image through block 1: x G^T = x - (x U^T) W.
  template <bool kTwoTerms>
  __device__ __forceinline__ void set_carried(float (&d)[K / 2], int image) const {
    uint32_t xu[4][4], rest[4][4];
    {
      float product[32];
      wgmma_fence();
      multiply_by_rows<K>(product, rows(image, 0), rows(Memory::kU, 1));
      wgmma_commit();
      wgmma_wait<0>();
      hold(product);
      round_rows(xu, product);
      if constexpr (kTwoTerms) round_rest(rest, product, xu);
    }
    read_rows(d, shared + image, row);
    accumulate(d, [&](float(&carried)[K / 2]) {
      multiply_rows<true>(carried, xu, rows(Memory::kW, 1));
      if constexpr (kTwoTerms) multiply_rows<true>(carried, rest, rows(Memory::kW, 1));
    });
  }
  // By warpgroup 0: block 0's W and keys, which go to the workspace. W U^T takes two terms: with beta near 2 it is large, and G cancels most of it.
  __device__ __forceinline__ void carry_block_0(unsigned char* image) const {
    float d[K / 2];
    set_carried<true>(d, Memory::kW);
    write_rows(shared + Memory::kCarriedW, d, row, kBlock);
    set_carried<false>(d, Memory::kKeys);
    replace_rows(d);
    send_rows(image, row, kTile);
    sync_block();
  }

  // I + what `issue` multiplies into rows 64 i ... of it, to the workspace.
  template <typename Issue>
  __device__ __forceinline__ void send_matrix(unsigned char* image, Issue issue) const {
#pragma unroll 1
    for (int i = 0; i < K / 64; ++i) {
      const int first = kBlock * i + row % kBlock;
      float d[K / 2];
#pragma unroll
      for (int e = 0; e < K / 2; ++e) d[e] = first + fragment_row() + e / 2 % 2 * 8 == e / 4 * 8 + fragment_column() + e % 2;
      accumulate(d, [&](float(&p)[K / 2]) { issue(p, i); });
      replace_rows(d);
      send_rows(image, first, K);
    }
  }
  // G = I - W^T U of the warpgroup's block.
  __device__ __forceinline__ void send_block_matrix(unsigned char* image) const {
    send_matrix(image, [&](float(&d)[K / 2], int i) { multiply<1, 1>(d, rows(Memory::kW, block) + i * kPanelBytes, rows(Memory::kU, block)); });
  }
  // By warpgroup 0: of both blocks, W of block 0 carried through block 1.
  __device__ __forceinline__ void send_tile_matrix(unsigned char* image) const {
    send_matrix(image, [&](float(&d)[K / 2], int i) {
      multiply<1, 1>(d, shared + Memory::kCarriedW + i * kBlockBytes, rows(Memory::kU, 0));
      multiply<1, 1>(d, rows(Memory::kW, 1) + i * kPanelBytes, rows(Memory::kU, 1));
    });
  }

  // Scores s with block `other`, those of the rows' own block first, become weights relative to the rows' largest so far; to be rounded.
  template <bool kOwn>
  __device__ __forceinline__ void softmax(Gathered<V>& gathered, float (&s)[32], int other, float score_factor, const float2* prefix) const {
    const int own_row = row + fragment_row(), first = kBlock * other + fragment_column();
    if constexpr (kGated) {
      const float2 of_row[2] = {prefix[own_row], prefix[own_row + 8]};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float4 of_pair = *reinterpret_cast<const float4*>(prefix + first + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 of_column = i % 2 ? make_float2(of_pair.z, of_pair.w) : make_float2(of_pair.x, of_pair.y);
          s[4 * n + i] = fmaf(s[4 * n + i], score_factor, (of_row[i / 2].x - of_column.x) + (of_row[i / 2].y - of_column.y));
        }
      }
    }
    const float factor = kGated ? 1.f : score_factor;
    if constexpr (kOwn) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (first + i / 4 * 8 + i % 2 > own_row + i / 2 % 2 * 8) s[i] = -INFINITY;
    }
    float most[4] = {s[0], s[1], s[2], s[3]}, sums[4] = {0, 0, 0, 0}, largest[2];  // four chains, which do not wait for each other
#pragma unroll
    for (int i = 4; i < 32; ++i) most[i % 4] = fmaxf(most[i % 4], s[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = row_max(fmaxf(most[2 * half], most[2 * half + 1])) * factor;
      if constexpr (!kOwn) {
        largest[half] = fmaxf(largest[half], gathered.largest[half]);
        const float decay = exp2_fast(gathered.largest[half] - largest[half]);
        gathered.sum[half] *= decay;
#pragma unroll
        for (int n = 0; n < V / 8; ++n) gathered.out[4 * n + 2 * half] *= decay, gathered.out[4 * n + 2 * half + 1] *= decay;
      }
      gathered.largest[half] = largest[half];
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] = exp2_fast(fmaf(s[i], factor, -largest[i / 2 % 2]));
      sums[i % 4] += s[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sums[2 * half] + sums[2 * half + 1];
      gathered.sum[half] = kOwn ? sum : gathered.sum[half] + sum;
    }
  }

  // Queries meet the keys of a block, their own or block 0 from block 1, and are carried to its start.
  template <bool kOwn>
  __device__ __forceinline__ void attend(Gathered<V>& gathered, int other, float score_factor, const float2* prefix) const {
    uint32_t lower[4][4], minus_upper[4][4];  // of q W^T
    if constexpr (kPath) {
      float r[32];
      wgmma_fence();
      multiply_by_rows<K>(r, rows(Memory::kRows, block), rows(Memory::kW, other));
      wgmma_commit();
      wgmma_wait<0>();
      hold(r);
      round_rows(lower, r);
    }
    if constexpr (kPath && kOwn) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t kept = 16 * k < row % kBlock ? 0xffffffffu : 16 * k > row % kBlock ? 0u : up_to_diagonal(i);
          minus_upper[k][i] = negated(lower[k][i] & ~kept);
          lower[k][i] &= kept;
        }
    }
    float s[32];
    if constexpr (!kBackward) {
      wgmma_fence();
      multiply_by_rows<K>(s, rows(Memory::kRows, block), rows(Memory::kKeys, other));
      if constexpr (kPath && kOwn) multiply_rows<true>(s, minus_upper, x());
      wgmma_commit();
      wgmma_wait<0>();
      hold(s);
    }
    uint32_t p[4][4];
    if constexpr (!kBackward) {
      softmax<kOwn>(gathered, s, other, score_factor, prefix);
      round_rows(p, s);
      if constexpr (!kOwn) hold(gathered.out);
    }
    float carried[K / 2];
    if constexpr (kPath) {
      read_rows(carried, shared + Memory::kRows, row);
      hold(carried);
    }
    wgmma_fence();
    if constexpr (!kBackward) multiply_rows<!kOwn>(gathered.out, p, rows(Memory::kValues, other));
    if constexpr (kPath) multiply_rows<true>(carried, lower, rows(Memory::kU, other));
    wgmma_commit();
    wgmma_wait<0>();
    if constexpr (!kBackward) hold(gathered.out);
    if constexpr (kPath) {
      hold(carried);
      replace_rows(carried);
    }
  }

  __device__ void write_attention(const Gathered<V>& gathered, int64_t at_query) const {
    uint32_t* out = call.at.local_out + (at_query * 8 + warp) * (V / 8 * 64) + lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum(gathered.sum[half]), by_sum = 1 / sum;
#pragma unroll
      for (int n = 0; n < V / 8; ++n)
        out[n * 64 + half * 32] = pack(gathered.out[4 * n + 2 * half] * by_sum, gathered.out[4 * n + 2 * half + 1] * by_sum);
      if (lane_id() % 4 == 0) call.at.local_lse[at_query * kTile + row + fragment_row() + 8 * half] = gathered.largest[half] + log2f(sum);
    }
  }

  // By one thread: what of shared memory other kernels read as it is.
  __device__ void send_values_and_keys(int64_t slot, bool is_last) const {
    const unsigned char* keys = shared + Memory::kKeys;
    if (!is_last || (kBackward && tile.count > kBlock)) store_bulk(call.at.values + slot * kImageBytes<V>, shared + Memory::kValues, kImageBytes<V>);
    if (!is_last) {
      constexpr int kFirst = kPath ? kBlockBytes : 0;  // with w, block 0's keys go on first
      for (int panel = 0; panel < K / 64; ++panel)
        store_bulk(call.at.keys[0] + slot * kImageBytes<K> + panel * kPanelBytes + kFirst, keys + panel * kPanelBytes + kFirst, kPanelBytes - kFirst);
    }
    if constexpr (kBackward) {
      if constexpr (kPath) store_bulk(call.at.transform_w + slot * kImageBytes<K>, shared + Memory::kW, kImageBytes<K>);
      for (int panel = 0; panel < K / 64; ++panel)
        store_bulk(call.at.block_keys + slot * kHalfImageBytes<K> + panel * kBlockBytes, keys + panel * kPanelBytes, kBlockBytes);
    }
    commit_bulk();
  }
};

template <int K, int V, bool kPath, bool kGated, bool kBackward>
__global__ void __launch_bounds__(kLocalThreads, K == 64 && V == 64 ? 2 : 1) attend_locally(const __grid_constant__ Call call, int num_units) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Memory = LocalMemory<K, V>;
  using Work = Local<K, V, kPath, kGated, kBackward>;
  const int64_t tile_slot = blockIdx.x / num_units;  // neighbours in memory, the heads of a tile, run side by side
  if (tile_slot >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[tile_slot];
  const Unit unit = key_unit(call, blockIdx.x % num_units);
  const Work local(call, tile, shared);
  const int64_t at = slot(call, unit.local, tile_slot);
  const bool is_last = tile.index + 1 == tile.num_tiles;  // then nobody meets its keys
  float* const maxima = reinterpret_cast<float*>(shared + Memory::kMaxima);
  const auto tile_max = [&](float largest, int which) {
    if (lane_id() == 0) maxima[8 * which + local.warp] = largest;
  };
  const auto factor_of = [&](int which) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, maxima[8 * which + i]);
    return factor_for(largest);
  };

  InputRows<K> q;
  const auto load_queries = [&](int member, int row) { q.load(call.q, unit.b, tile.first(), unit.h * call.group + member, row, tile.count); };
  float query_factor;  // of the scale's sign
  const auto store_queries = [&](int which, int row) {
    const float factor = factor_of(which);
    query_factor = copysignf(factor, call.scale);
    q.store(shared + Memory::kRows, row, call.q.dtype, copysignf(reciprocal_of_power(factor), call.scale));
    fence_async();
  };
  float key_factor;
  {
    WRows<K> w;
    InputRows<K> k;
    InputRows<V> v;
    if constexpr (kPath) w.load(call, unit, tile, local.row);
    k.load(call.k, unit.b, tile.first(), unit.h, local.row, tile.count);
    v.load(call.v, unit.b, tile.first(), unit.h, local.row, tile.count);
    load_queries(0, local.row);
    if constexpr (kPath) {
      w.store(local.row, shared + Memory::kW, reinterpret_cast<float*>(shared + Memory::kBeta),
              kBackward ? call.at.transform_rows + (2 * at + 1) * kTile : nullptr);
    }
    tile_max(k.largest(call.k.dtype), 0);
    tile_max(v.largest(call.v.dtype), 1);
    tile_max(q.largest(call.q.dtype), 2);
    __syncthreads();
    key_factor = factor_of(0);
    const float value_factor = factor_of(1);
    k.store(shared + Memory::kKeys, local.row, call.k.dtype, reciprocal_of_power(key_factor));
    v.store(shared + Memory::kValues, local.row, call.v.dtype, reciprocal_of_power(value_factor));
    store_queries(2, local.row);
    if (threadIdx.x == 0) {
      call.at.key_factors[at] = key_factor;
      call.at.value_factors[at] = value_factor;
    }
  }
  if constexpr (kPath) {
    local.sync_block();
    local.transform(at);
  }
  __syncthreads();
  if constexpr (kPath && kBackward) {
    if (threadIdx.x < kTile)
      call.at.transform_rows[2 * at * kTile + threadIdx.x] = reinterpret_cast<const float*>(shared + Memory::kBeta)[threadIdx.x];
  }
  if (threadIdx.x == kLocalThreads - 32) local.send_values_and_keys(at, is_last);

  for (int member = 0; member < call.group; ++member) {
    const Work here(call, tile, shared);  // anew: what the compiler makes of it before the loop would fill the registers
    const int64_t at_query = slot(call, unit.local * call.group + member, tile_slot);
    if (member > 0) {
      const int which = 2 + member % 2, row = here.row;
      load_queries(member, row);
      tile_max(q.largest(call.q.dtype), which);
      if (lane_id() == 0) wait_bulk_read();
      __syncthreads();
      store_queries(which, row);
      here.sync_block();
    }
    const float score_factor = kLog2E * call.scale * query_factor * key_factor;
    const float2* prefix = kGated ? call.at.gate_prefix + at_query * kTile : nullptr;
    Gathered<V> gathered;
    here.template attend<true>(gathered, here.block, score_factor, prefix);
    if (here.block == 1) {
      if (kBackward && tile.count > kBlock) here.send_rows(call.at.block_queries + at_query * kHalfImageBytes<K>, here.row - kBlock, kBlock);
      here.sync_block();
      here.template attend<false>(gathered, 0, score_factor, prefix);
    }
    here.send_rows(call.at.queries + at_query * kImageBytes<K>, here.row, kTile);
    if (threadIdx.x == 0) call.at.query_factors[at_query] = query_factor;
    if constexpr (!kBackward) here.write_attention(gathered, at_query);
  }
  if constexpr (kPath) {
    if constexpr (kBackward) local.send_block_matrix(call.at.block_matrices + (2 * at + local.block) * kMatrixBytes<K>);
    if (!is_last && local.block == 0) {
      local.carry_block_0(call.at.keys[0] + at * kImageBytes<K>);
      local.send_tile_matrix(call.at.matrices[0] + matrix_slot(call, unit.local, tile_slot, 0) * kMatrixBytes<K>);
    }
  }
  if (lane_id() == 0) wait_bulk_read();
}

}  // namespace pathattn::cuda::hopper
