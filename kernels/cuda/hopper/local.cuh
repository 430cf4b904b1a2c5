// The first stage, a CTA a tile and key head: the UT transform of the tile's two blocks, keys carried to the tile's end, G of the tile, and for each
// query head the attention inside the tile and the queries carried to the tile's start. Products by mma, in warps of 16 rows. Backward wants what
// lies between the two blocks as well, and the attention only to have it before rounding, with a gate.
#pragma once

#include "kernels/cuda/hopper/block_transform.cuh"
#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/input.cuh"

namespace pathattn::cuda::hopper {

inline constexpr int kLocalThreads = 256;  // warps 0-3: block 0, the first 64 rows; warps 4-7: block 1

// Shared memory, bytes. U takes the place of the squares, X that of L.
template <int K, int V>
struct LocalMemory {
  static constexpr int kW = 0, kKeys = kW + kImageBytes<K>, kValues = kKeys + kImageBytes<K>, kU = kValues + kImageBytes<V>;
  static constexpr int kSquares = 2 * kSquareFloats * 4;
  static constexpr int kX = kU + (kImageBytes<K> > kSquares ? kImageBytes<K> : (kSquares + 1023) / 1024 * 1024);  // two panels of 64 rows
  static constexpr int kCarriedW = kX + 2 * kBlock * 128;  // W of block 0 carried to the tile's end
  static constexpr int kBeta = kCarriedW + K / 64 * kBlock * 128, kMaxima = kBeta + kTile * 4, kTotal = kMaxima + 3 * 8 * 4;
};

// The power of two that brings numbers up to `largest` near 32: far from float16's limits, with room to grow by a sum over a row.
__device__ inline float factor_for(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  if (largest == 0 || exponent > 127) return 1.f;
  return __uint_as_float(static_cast<uint32_t>(max(exponent - 5, -120) + 127) << 23);
}
__device__ inline float reciprocal_of_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// 16 rows of a 16-bit tensor in a warp's registers, 16 bytes a lane: rows r of the tile, zero from `count` on.
template <int D>
struct InputRows {
  static constexpr int kChunks = D / 8, kLoads = 16 * kChunks / 32;
  uint4 x[kLoads];

  __device__ void load(const Tensor& tensor, int64_t b, int64_t token, int h, int row, int count) {
    const auto* at = static_cast<const uint16_t*>(tensor.data) + b * tensor.batch_stride + h * tensor.head_stride + lane_id() % kChunks * 8;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int r = row + (i * 32 + lane_id()) / kChunks;
      x[i] = r < count ? *reinterpret_cast<const uint4*>(at + (token + r) * tensor.token_stride) : uint4{0, 0, 0, 0};
    }
  }
  __device__ float largest(DType dtype) const {
    float most = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      for (uint32_t pair : {x[i].x, x[i].y, x[i].z, x[i].w}) {
        const float2 two = unpack_input(pair, dtype);
        most = fmaxf(most, fmaxf(fabsf(two.x), fabsf(two.y)));
      }
    return warp_max(most);
  }
  __device__ void store(unsigned char* image, int row, DType dtype, float by) const {
    const auto scaled = [&](uint32_t pair) {
      const float2 two = unpack_input(pair, dtype);
      return pack(two.x * by, two.y * by);
    };
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int r = row + (i * 32 + lane_id()) / kChunks, chunk = lane_id() % kChunks;
      *reinterpret_cast<uint4*>(image + image_byte(r, 8 * chunk)) = {scaled(x[i].x), scaled(x[i].y), scaled(x[i].z), scaled(x[i].w)};
    }
  }
};

// 16 rows of w, which become float16 each with a power of two of its own that brings its largest number to [1/4, 1/2): beta takes it back.
template <int K>
struct WRows {
  static constexpr int kChunks = K / 4, kLoads = 16 * kChunks / 32;
  float4 x[kLoads];
  float beta;  // of row + lane_id(), lanes 0-15

  __device__ void load(const Call& call, const Unit& unit, const Tile& tile, int row) {
    const Tensor& w = call.w;
    const auto* at = static_cast<const float*>(w.data) + unit.b * w.batch_stride + unit.h * w.head_stride + lane_id() % kChunks * 4;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int r = row + (i * 32 + lane_id()) / kChunks;
      x[i] = r < tile.count ? *reinterpret_cast<const float4*>(at + (tile.first() + r) * w.token_stride) : float4{0, 0, 0, 0};
    }
    const int r = row + lane_id();
    beta = lane_id() < 16 && r < tile.count ? call.beta.at(unit.b, tile.first() + r, unit.h) : 0.f;
  }
  __device__ void store(int row, unsigned char* image, float* betas, float* powers = nullptr) const {
    float beta_factor = 1;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int r = (i * 32 + lane_id()) / kChunks, chunk = lane_id() % kChunks;
      float largest = fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w)));
#pragma unroll
      for (int step = kChunks < 32 ? kChunks / 2 : 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
      const float factor = 128 * factor_for(largest), by = reciprocal_of_power(factor);
      *reinterpret_cast<uint2*>(image + image_byte(row + r, 4 * chunk)) = {pack(x[i].x * by, x[i].y * by), pack(x[i].z * by, x[i].w * by)};
#pragma unroll
      for (int part = 0; part < 32 / kChunks; ++part) {
        const float of_row = __shfl_sync(0xffffffffu, factor, part * kChunks);
        if (lane_id() == i * (32 / kChunks) + part) beta_factor = of_row;
      }
    }
    if (lane_id() < 16) betas[row + lane_id()] = beta * beta_factor * beta_factor;
    if (powers && lane_id() < 16) powers[row + lane_id()] = beta_factor;
  }
};

__device__ inline uint32_t negated(uint32_t pair) { return pair ^ 0x80008000u; }
// Which halves of register i of a 16 x 16 A lie on or below the diagonal, as a mask.
__device__ inline uint32_t up_to_diagonal(int i) {
  const int row = fragment_row() + i % 2 * 8, column = fragment_column() + i / 2 * 8;
  return (column <= row ? 0xffffu : 0u) | (column + 1 <= row ? 0xffff0000u : 0u);
}

// A warp's 16 rows of queries on their way through a tile, and what they have gathered.
template <int K, int V>
struct LocalRows {
  uint32_t q[K / 16][4];
  float out[V / 8][4];
  float largest[2], sum[2];  // base-2 scores' maximum, sum of exp2(score - maximum); of rows fragment_row() and + 8
};

template <int K, int V, bool kPath, bool kGated, bool kBackward>
struct Local {
  using Memory = LocalMemory<K, V>;
  static constexpr bool kAttends = !kBackward || kGated;
  const Call& call;
  const Tile& tile;
  unsigned char* shared;
  int warp, block, row;  // row: the warp's first in the tile

  __device__ Local(const Call& call, const Tile& tile, unsigned char* shared)
      : call(call), tile(tile), shared(shared), warp(threadIdx.x / 32), block(warp / 4), row(16 * warp) {}

  __device__ unsigned char* at(int offset) const { return shared + offset; }
  __device__ uint32_t address(int offset) const { return shared_address(shared + offset); }
  __device__ void sync_block() const { sync_threads(1 + block, 128); }
  __device__ int x_panel() const { return Memory::kX + block * kBlock * 128; }

  __device__ void load_queries(LocalRows<K, V>& rows, const Unit& head) const {
    const auto* q = static_cast<const uint16_t*>(call.q.data) + head.b * call.q.batch_stride + head.h * call.q.head_stride + fragment_column();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + fragment_row() + 8 * half;
      const auto* at = q + (tile.first() + r) * call.q.token_stride;
#pragma unroll
      for (int p = 0; p < K / 8; ++p) rows.q[p / 2][p % 2 * 2 + half] = r < tile.count ? *reinterpret_cast<const uint32_t*>(at + 8 * p) : 0;
    }
  }

  __device__ void store_queries(unsigned char* image, const LocalRows<K, V>& rows, int first_row, int panel_rows) const {
#pragma unroll
    for (int p = 0; p < K / 16; ++p)
#pragma unroll
      for (int i = 0; i < 4; ++i) store_pair(image, first_row + i % 2 * 8, 16 * p + i / 2 * 8, rows.q[p][i], panel_rows);
  }

  // From W and K in shared memory: -U, -X, and in place of K the keys carried to their block's end.
  __device__ void transform() const {
    const float* beta = reinterpret_cast<const float*>(at(Memory::kBeta));
    const Square square{reinterpret_cast<float*>(at(Memory::kU)) + block * kSquareFloats};
    const int in_block = row % kBlock, first = block * kBlock;
    {
      float ww[8][4], wk[8][4];
      clear(ww), clear(wk);
#pragma unroll 2
      for (int k = 0; k < K; k += 16) {
        uint32_t a[4];
        load_a(a, address(Memory::kW), row, k);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          if (16 * n > in_block) continue;
          multiply_a_16_columns(ww[2 * n], ww[2 * n + 1], a, address(Memory::kW), k, first + 16 * n);
          multiply_a_16_columns(wk[2 * n], wk[2 * n + 1], a, address(Memory::kKeys), k, first + 16 * n);
        }
      }
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = in_block + fragment_row() + i / 2 * 8, c = 8 * n + fragment_column() + i % 2;
          if (c < r) square.at[r * kSquareStride + c] = ww[n][i] * beta[first + r];
          if (c >= r) wk[n][i] = 0;
        }
      store_rows(at(x_panel()), wk, in_block, 0, kBlock);
    }
    __syncwarp();
    invert_16(square, in_block);
    sync_block();
    merge_inverses<16>(square, warp % 4, 1 + block);
    merge_inverses<32>(square, warp % 4, 1 + block);

    // -T = -Y B in two terms of float16: the only ill-conditioned factor.
    uint32_t high[4][4], low[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = in_block + fragment_row() + i % 2 * 8, c = 16 * k + fragment_column() + i / 2 * 8;
        const float x = -square.y(r, c) * beta[first + c], y = -square.y(r, c + 1) * beta[first + c + 1];
        high[k][i] = pack(x, y);
        const float2 rounded = unpack(high[k][i]);
        low[k][i] = pack(x - rounded.x, y - rounded.y);
      }
    __syncthreads();
    const auto times_t = [&](float(&d)[8][4], int image, int row0, int column, int panel_rows) {
      clear(d);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (16 * k > in_block) continue;
        multiply_a_rows(d, high[k], low[k], address(image), row0 + 16 * k, column, panel_rows);
      }
    };
    float d[8][4];
    times_t(d, x_panel(), 0, 0, kBlock);
    sync_block();
    store_rows(at(x_panel()), d, in_block, 0, kBlock);
#pragma unroll 1
    for (int column = 0; column < K; column += 64) {
      times_t(d, Memory::kW, first, column, kTile);
      store_rows(at(Memory::kU), d, row, column);
    }
    sync_block();
#pragma unroll 1
    for (int column = 0; column < K; column += 64) {
      load_rows(d, at(Memory::kKeys), row, column);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (16 * k + 15 < in_block) continue;
        uint32_t a[4];
        load_a_transposed(a, address(x_panel()), in_block, 16 * k, kBlock);
        multiply_a_rows(d, a, address(Memory::kW), first + 16 * k, column);
      }
      store_rows(at(Memory::kKeys), d, row, column);
    }
  }

  // Block 0's rows of K and of W through block 1: x <- x G^T = x - (x U^T) W. The keys go to the workspace.
  __device__ void carry_block_0(unsigned char* keys) const {
    const bool is_key = block == 0;
    const int r = row % kBlock;
    float xu[8][4];
    clear(xu);
#pragma unroll 2
    for (int k = 0; k < K; k += 16) {
      uint32_t a[4];
      load_a(a, address(is_key ? Memory::kKeys : Memory::kW), r, k);
      multiply_a_columns(xu, a, address(Memory::kU), k, kBlock);
    }
#pragma unroll 1
    for (int column = 0; column < K; column += 64) {
      float d[8][4];
      load_rows(d, at(is_key ? Memory::kKeys : Memory::kW), r, column);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t a[4];
        round_to_a(a, xu, k);
        multiply_a_rows(d, a, address(Memory::kW), kBlock + 16 * k, column);
      }
      if (is_key)
        store_rows(keys, d, r, column);
      else
        store_rows(at(Memory::kCarriedW), d, r, column, kBlock);
    }
  }

  // G = I - W^T U over the tokens from `first` to before `last`; over both blocks, W of block 0 is that carried through block 1.
  __device__ void store_matrix(unsigned char* matrix, int first, int last) const {
    constexpr int kColumns = K == 128 ? 64 : 32;  // at a time; at K = 64 warps 4-7 take the second half
    const int r = 16 * (warp % (K / 16)), first_column = K == 128 ? 0 : warp / 4 * kColumns;
#pragma unroll 1
    for (int column = first_column; column < first_column + K / (K == 128 ? 1 : 2); column += kColumns) {
      float d[kColumns / 8][4];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) d[n][i] = r + fragment_row() + i / 2 * 8 == column + 8 * n + fragment_column() + i % 2;
#pragma unroll 2
      for (int k = first; k < last; k += 16) {
        uint32_t a[4];
        if (k < kBlock && last == kTile)
          load_a_transposed(a, address(Memory::kCarriedW), r, k, kBlock);
        else
          load_a_transposed(a, address(Memory::kW), r, k);
        multiply_a_rows(d, a, address(Memory::kU), k, column);
      }
      store_rows(matrix, d, r, column, K);
    }
  }

  // The softmax of scores with a block, and its values.
  __device__ void add_values(LocalRows<K, V>& rows, float (&s)[8][4], int other, float score_factor, int64_t gate_slot) const {
    const bool own = other == block;
    const int in_block = row % kBlock, first = other * kBlock;
    const float2* prefix = call.at.gate_prefix + gate_slot;
    float largest[2] = {rows.largest[0], rows.largest[1]};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + fragment_row() + i / 2 * 8, c = first + 8 * n + fragment_column() + i % 2;
        s[n][i] *= score_factor;
        if constexpr (kGated) s[n][i] += (prefix[r].x - prefix[c].x) + (prefix[r].y - prefix[c].y);
        if (own && c > r) s[n][i] = -INFINITY;
        largest[i / 2] = fmaxf(largest[i / 2], s[n][i]);
      }
    float decay[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = row_max(largest[half]);
      decay[half] = exp2_fast(rows.largest[half] - largest[half]);  // the own block comes first: its diagonal leaves no row empty
      rows.largest[half] = largest[half];
      rows.sum[half] *= decay[half];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = exp2_fast(s[n][i] - largest[i / 2]);
        rows.sum[i / 2] += s[n][i];
      }
#pragma unroll
    for (int n = 0; n < V / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.out[n][i] *= decay[i / 2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (own && 16 * k > in_block) continue;
      uint32_t a[4];
      round_to_a(a, s, k);
      multiply_a_rows(rows.out, a, address(Memory::kValues), first + 16 * k, 0);
    }
  }

  // Rows meet the keys of a block, their own or block 0 from block 1, and are carried to its start.
  __device__ void attend(LocalRows<K, V>& rows, int other, float score_factor, int64_t gate_slot) const {
    const bool own = other == block;
    const int in_block = row % kBlock, first = other * kBlock;
    float s[8][4];
    if constexpr (kAttends) {
      clear(s);
#pragma unroll
      for (int k = 0; k < K; k += 16) multiply_a_columns(s, rows.q[k / 16], address(Memory::kKeys), k, first);
    }
    uint32_t r[4][4];  // q W^T, 16 tokens of the block an entry
    if constexpr (kPath) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        float d[2][4];
        clear(d);
#pragma unroll
        for (int k = 0; k < K; k += 16) multiply_a_columns(d, rows.q[k / 16], address(Memory::kW), k, first + 16 * p);
        round_to_a(r[p], d, 0);
        if (kAttends && own && 16 * p >= in_block) {
          uint32_t above[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) above[i] = negated(16 * p > in_block ? r[p][i] : r[p][i] & ~up_to_diagonal(i));
          multiply_a_rows(s, above, address(x_panel()), 16 * p, 0, kBlock);
        }
      }
    }

    if constexpr (kAttends) add_values(rows, s, other, score_factor, gate_slot);
    if constexpr (kPath) {
      float carried[K / 8][4];
#pragma unroll
      for (int k = 0; k < K / 16; ++k) unround(carried, rows.q[k], k);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        if (own && 16 * p > in_block) continue;
        if (own && 16 * p == in_block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) r[p][i] &= up_to_diagonal(i);
        }
        multiply_a_rows(carried, r[p], address(Memory::kU), first + 16 * p, 0);
      }
#pragma unroll
      for (int k = 0; k < K / 16; ++k) round_to_a(rows.q[k], carried, k);
    }
  }
};

template <int K, int V, bool kPath, bool kGated, bool kBackward>
__global__ void __launch_bounds__(kLocalThreads, K == 64 && V == 64 ? 2 : 1) attend_locally(const __grid_constant__ Call call, int num_units) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Memory = LocalMemory<K, V>;
  const int64_t tile_slot = blockIdx.x / num_units;  // neighbours in memory, the heads of a tile, run side by side
  if (tile_slot >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[tile_slot];
  const Unit unit = key_unit(call, blockIdx.x % num_units);
  const Local<K, V, kPath, kGated, kBackward> local(call, tile, shared);
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

  WRows<K> w;
  InputRows<K> k;
  InputRows<V> v;
  LocalRows<K, V> rows;
  if constexpr (kPath) w.load(call, unit, tile, local.row);
  k.load(call.k, unit.b, tile.first(), unit.h, local.row, tile.count);
  v.load(call.v, unit.b, tile.first(), unit.h, local.row, tile.count);
  local.load_queries(rows, query_unit(call, unit.local * call.group));
  if constexpr (kPath) w.store(local.row, shared + Memory::kW, reinterpret_cast<float*>(shared + Memory::kBeta));
  tile_max(k.largest(call.k.dtype), 0);
  tile_max(v.largest(call.v.dtype), 1);
  __syncthreads();
  const float key_factor = factor_of(0), value_factor = factor_of(1);
  k.store(shared + Memory::kKeys, local.row, call.k.dtype, reciprocal_of_power(key_factor));
  v.store(shared + Memory::kValues, local.row, call.v.dtype, reciprocal_of_power(value_factor));
  if (threadIdx.x == 0) {
    call.at.key_factors[at] = key_factor;
    call.at.value_factors[at] = value_factor;
  }
  __syncthreads();
  if constexpr (kPath) {
    local.transform();
    __syncthreads();
  }
  if (!is_last) {
    unsigned char* keys = call.at.keys[0] + at * kImageBytes<K>;
    const auto copy = [](unsigned char* to, const unsigned char* from, int panels, int first_row) {
      const int chunks = (kTile - first_row) * 8;
      for (int i = threadIdx.x; i < panels * chunks; i += kLocalThreads) {
        const int byte = i / chunks * kPanelBytes + first_row * 128 + i % chunks * 16;
        *reinterpret_cast<uint4*>(to + byte) = *reinterpret_cast<const uint4*>(from + byte);
      }
    };
    copy(call.at.values + at * kImageBytes<V>, shared + Memory::kValues, V / 64, 0);
    copy(keys, shared + Memory::kKeys, K / 64, kPath ? kBlock : 0);
    if constexpr (kPath) {
      local.carry_block_0(keys);
      __syncthreads();
      local.store_matrix(call.at.matrices[0] + matrix_slot(call, unit.local, tile_slot, 0) * kMatrixBytes<K>, 0, kTile);
    }
  }
  if constexpr (kBackward) {
    constexpr int kPanelChunks = kBlock * 8;
    unsigned char* keys = call.at.block_keys + at * kHalfImageBytes<K>;
    for (int i = threadIdx.x; i < K / 64 * kPanelChunks; i += kLocalThreads)
      reinterpret_cast<uint4*>(keys)[i] =
          *reinterpret_cast<const uint4*>(shared + Memory::kKeys + i / kPanelChunks * kPanelBytes + i % kPanelChunks * 16);
    if constexpr (kPath) {
      for (int block = 0; block < 2; ++block)
        local.store_matrix(call.at.block_matrices + (2 * at + block) * kMatrixBytes<K>, block * kBlock, (block + 1) * kBlock);
    }
  }

  for (int member = 0; member < call.group; ++member) {
    const int64_t query = unit.local * call.group + member;
    const int64_t at_query = slot(call, query, tile_slot);
    if (member > 0) local.load_queries(rows, query_unit(call, query));
    float largest = 0;
#pragma unroll
    for (int p = 0; p < K / 16; ++p)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_input(rows.q[p][i], call.q.dtype);
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    tile_max(warp_max(largest), 2);
    __syncthreads();
    const float query_factor = copysignf(factor_of(2), call.scale), by = copysignf(reciprocal_of_power(fabsf(query_factor)), call.scale);
    __syncthreads();
#pragma unroll
    for (int p = 0; p < K / 16; ++p)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_input(rows.q[p][i], call.q.dtype);
        rows.q[p][i] = pack(pair.x * by, pair.y * by);
      }
    if constexpr (Local<K, V, kPath, kGated, kBackward>::kAttends) {
      clear(rows.out);
      rows.sum[0] = rows.sum[1] = 0;
      rows.largest[0] = rows.largest[1] = -INFINITY;
    }
    const float score_factor = kLog2E * call.scale * query_factor * key_factor;
    const int64_t gate_slot = at_query * kTile;
#pragma unroll 1
    for (int other = local.block; other >= 0; --other) {
      local.attend(rows, other, score_factor, gate_slot);
      if (kBackward && other == 1 && tile.count > kBlock)
        local.store_queries(call.at.block_queries + at_query * kHalfImageBytes<K>, rows, local.row - kBlock, kBlock);
    }
    local.store_queries(call.at.queries + at_query * kImageBytes<K>, rows, local.row, kTile);
    if (threadIdx.x == 0) call.at.query_factors[at_query] = query_factor;
    if constexpr (!Local<K, V, kPath, kGated, kBackward>::kAttends) continue;
    uint32_t* out = call.at.local_out + (at_query * 8 + local.warp) * (V / 8 * 64) + lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum(rows.sum[half]), by_sum = 1 / sum;
#pragma unroll
      for (int n = 0; n < V / 8; ++n) out[n * 64 + half * 32] = pack(rows.out[n][2 * half] * by_sum, rows.out[n][2 * half + 1] * by_sum);
      if (lane_id() % 4 == 0) call.at.local_lse[gate_slot + local.row + fragment_row() + 8 * half] = rows.largest[half] + log2f(sum);
    }
  }
}

}  // namespace pathattn::cuda::hopper
