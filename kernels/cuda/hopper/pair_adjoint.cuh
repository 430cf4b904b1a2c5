// Backward between the two blocks of a tile, before what is inside them: q1, block 1's queries carried to its start, meet k0, block 0's keys carried
// to its end. The tile's G is q <- (q G1) G0; dQ1 is the gradient of block 1's queries at the tile's start, dK0 of block 0's keys at the tile's end.
//   S = q1 k0^T,  P = exp(S - lse),  dS = P (dO1 V0^T - delta),  dV0 += P^T dO1
//   dq1 = dS k0 + dQ1 G0^T          dk0 = dS^T q1 + dK0 G1
//   dG0 = q1^T dQ1 + G1^T dG        dG1 = dK0^T k0 + dG G0^T
//
// Two warpgroups share the images and nothing else. The first has the keys' side (S^T, dV0, dk0, dG1), the second the queries' (S, dq1, transposed
// dG0); both make P and dS, which stay in registers as operand A. Float32 rows become A as well, those of a transposed operand by their addresses, so
// each warp has a power of two of its own and none waits for another to find it.
#pragma once

#include <algorithm>

#include "kernels/cuda/hopper/far_gradient.cuh"
#include "kernels/cuda/hopper/local.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"

namespace pathattn::cuda::hopper {

// Besides what the far kernels' arrays hold. Here d_queries' rows 64 ... 127 become dq1, rows 0 ... 63 of the level-0 d_keys dk0; rows 0 ... 63 of
// d_values gain dV0. Rows of d_queries beyond the tile's tokens are zero.
struct PairGradients {
  const unsigned char* block_queries;   // [query unit][max_tiles] images of 64 rows: q1, with the tile's query_factors
  const unsigned char* block_keys;      // [unit][max_tiles] images of 64 rows: k0, with key_factors
  const unsigned char* block_matrices;  // [unit][max_tiles][2] G0, G1
  float* block_dmatrices;               // [unit][max_tiles][2][K][K] dG0, dG1
  float* key_sums;                      // [unit][max_tiles][kBlock][K] scratch, with w and several query heads a key head: dS^T q1 of heads so far
  float* gate_sums;                     // [query unit][max_tiles][kTile] with a gate: minus column sums of dS, then row sums; zero without a block 1
};

// Which gradients reach a block from outside it, as this kernel leaves them; where there is none the arrays hold anything. dkeys: of values too.
struct BlockInputs {
  bool dqueries, dkeys, dmatrix;
  __device__ BlockInputs(const Tile& tile, int block) {
    const bool has_pair = tile.count > kBlock, is_last = tile.index + 1 == tile.num_tiles;
    dqueries = block == 1 || tile.index > 0;
    dkeys = block == 0 ? has_pair : !is_last;
    dmatrix = block == 0 ? has_pair && tile.index > 0 : !is_last;
  }
};

inline constexpr int kPairThreads = 256;

// Shared memory, bytes. At K = 128 G1 comes when values and d_out are done with, in their place, so that two CTAs share a multiprocessor.
template <int K, int V>
struct PairMemory {
  static constexpr bool kMatrix1Waits = K == 128;
  static constexpr int kKeyRows = K / 64 * kBlockBytes, kValueRows = V / 64 * kBlockBytes;
  static constexpr int kKeys = 0, kQueries = kKeys + kKeyRows, kMatrix0 = kQueries + kKeyRows, kValues = kMatrix0 + kMatrixBytes<K>,
                       kDOut = kValues + kValueRows, kMatrix1 = kMatrix1Waits ? kValues : kDOut + kValueRows,
                       kOffsets = std::max(kDOut + kValueRows, kMatrix1 + kMatrixBytes<K>), kDelta = kOffsets + 2 * kBlock * 4,
                       kBarriers = kDelta + kBlock * 4, kTotal = kBarriers + 3 * 8;
};

// `p + by`, computed anew at each use: addresses kept from use to use would fill the registers.
template <typename T>
__device__ T* moved(T* p, int by) {
  asm volatile("" : "+r"(by));
  return p + by;
}

// d += A B, A in registers. B's columns are 64 rows of an image with panels of `panel_bytes` (kTransposeB 0), or 64 columns of a panel (1).
template <int kTransposeB, int kSteps>
__device__ void multiply_held(float (&d)[32], const uint32_t (&a)[kSteps][4], const unsigned char* image, uint32_t panel_bytes = 0) {
  const uint64_t b = descriptor(image);
  accumulate(d, [&](float(&p)[32]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) wgmma<kTransposeB>(p, a[k], advance(b, kTransposeB ? k * 2048 : k / 4 * panel_bytes + k % 4 * 32), true);
  });
}

// 64 rows and 16 kSteps columns of float32, or of the transpose of what lies there in rows of `width`, as wgmma's A. Returns the warp's factor.
template <bool kTransposed, int kSteps>
__device__ float load_as_a(uint32_t (&a)[kSteps][4], const float* from, int width) {
  float x[8 * kSteps];
  from = moved(from, kTransposed ? fragment_column() * width + own_row() : own_row() * width + fragment_column());
#pragma unroll
  for (int i = 0; i < 8 * kSteps; i += 2) {
    const int row = i / 2 % 2 * 8, column = i / 4 * 8;
    if constexpr (kTransposed) {
      x[i] = from[column * width + row];
      x[i + 1] = from[(column + 1) * width + row];
    } else {
      const float2 pair = *reinterpret_cast<const float2*>(from + row * width + column);
      x[i] = pair.x, x[i + 1] = pair.y;
    }
  }
  const float factor = gradient_factor(warp_max(largest_of(x))), by = reciprocal_of_power(factor);
#pragma unroll
  for (int i = 0; i < 8 * kSteps; i += 2) a[i / 8][i / 2 % 4] = pack(x[i] * by, x[i + 1] * by);
  return factor;
}

// One side's work on a tile.
template <int K, int V, bool kPath, bool kGate, bool kIsQueries>
struct PairSide {
  using Memory = PairMemory<K, V>;
  static constexpr int kOwn = kIsQueries ? Memory::kQueries : Memory::kKeys, kOther = kIsQueries ? Memory::kKeys : Memory::kQueries;
  static constexpr int kOwnValues = kIsQueries ? Memory::kDOut : Memory::kValues, kOtherValues = kIsQueries ? Memory::kValues : Memory::kDOut;

  const Call& call;
  const FarGradient& far;
  const PairGradients& pairs;
  unsigned char* shared;
  Tile tile;
  int64_t unit, at;  // at: the tile's slot of the key head

  uint32_t both_parity = 0;
  // Of the query head at work.
  int member = 0;
  int64_t at_query;
  float query_factor, key_factor, value_factor, d_out_factor, score_factor;

  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }
  __device__ uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(shared + Memory::kBarriers) + i; }
  __device__ bool is_first() const { return tile.index == 0; }
  __device__ bool is_last() const { return tile.index + 1 == tile.num_tiles; }
  __device__ bool has_rows() const { return kIsQueries ? !is_first() : !is_last(); }  // gradients of this side's rows outside the tile
  __device__ bool has_matrix() const { return !is_first() && !is_last(); }
  __device__ bool is_last_member() const { return member + 1 == call.group; }
  __device__ float* rows() const { return kIsQueries ? far.d_queries + (at_query * kTile + kBlock) * K : far.d_keys[0] + at * kTile * K; }
  __device__ const float* d_tile() const { return far.d_matrices[0] + matrix_slot(call, unit, at - unit * call.max_tiles, 0) * K * K; }
  __device__ float* d_matrix(int block) const { return pairs.block_dmatrices + (2 * at + block) * K * K; }
  // The sides come to it from different places of the code, so no hardware barrier.
  __device__ void sync_both() {
    __syncwarp();
    if (lane_id() == 0) arrive(barrier(2));
    wait(barrier(2), both_parity);
    both_parity ^= 1;
  }
  __device__ static void sync_side() { sync_threads(1 + kIsQueries, kPairThreads / 2); }

  // By one thread: the images of the query head, and with the first head what all of them use.
  __device__ void copy_images() const {
    const bool is_new = member == 0, with_matrix = kPath && is_new && !is_first();
    arrive_expecting(barrier(0), (1 + is_new) * (Memory::kKeyRows + Memory::kValueRows) + with_matrix * kMatrixBytes<K>);
    copy_bulk(shared + Memory::kQueries, pairs.block_queries + at_query * Memory::kKeyRows, Memory::kKeyRows, barrier(0));
    copy_rows<V>(shared + Memory::kDOut, far.d_out + at_query * kImageBytes<V>, kBlock, kBlock, barrier(0));
    if (is_new) {
      copy_bulk(shared + Memory::kKeys, pairs.block_keys + at * Memory::kKeyRows, Memory::kKeyRows, barrier(0));
      copy_rows<V>(shared + Memory::kValues, call.at.values + at * kImageBytes<V>, 0, kBlock, barrier(0));
    }
    if (with_matrix) copy_bulk(shared + Memory::kMatrix0, pairs.block_matrices + 2 * at * kMatrixBytes<K>, kMatrixBytes<K>, barrier(0));
    if (kPath && is_new && !is_last() && !Memory::kMatrix1Waits) copy_matrix1();
    if constexpr (K == 64) prefetch();  // at 128 the CTAs at work use more than the second-level cache holds
  }
  __device__ void copy_matrix1() const {
    arrive_expecting(barrier(1), kMatrixBytes<K>);
    copy_bulk(shared + Memory::kMatrix1, pairs.block_matrices + (2 * at + 1) * kMatrixBytes<K>, kMatrixBytes<K>, barrier(1));
  }
  // What comes from global memory later.
  __device__ void prefetch() const {
    if (!is_first()) prefetch_bulk(far.d_queries + (at_query * kTile + kBlock) * K, kBlock * K * 4);
    if (member > 0 || is_last()) return;
    prefetch_bulk(far.d_values + at * kTile * V, kBlock * V * 4);
    prefetch_bulk(far.d_keys[0] + at * kTile * K, kBlock * K * 4);
    if constexpr (kPath) prefetch_matrix();
  }
  __device__ void prefetch_matrix() const {
    if (has_matrix()) prefetch_bulk(d_tile(), K * K * 4);
  }

  // To base 2, from block 1's start: a query's gates less its lse, the gates after a key. Gates add up away from the block's edge, so none cancel.
  __device__ void write_vectors() const {
    const int r = static_cast<int>(threadIdx.x) % kBlock;
    float *const key_offsets = floats(Memory::kOffsets), *const query_offsets = key_offsets + kBlock;
    const float2* const prefix = kGate ? call.at.gate_prefix + at_query * kTile : nullptr;
    const auto between = [&](int from, int to) {
      const float2 x = prefix[from], y = prefix[to];
      return (y.x - x.x) + (y.y - x.y);
    };
    if (threadIdx.x < kBlock) {
      floats(Memory::kDelta)[r] = far.delta[at_query * kTile + kBlock + r];
      float offset = far.row_offsets[at_query * kTile + kBlock + r];
      if (kGate && kBlock + r < tile.count) {
        const Unit head = query_unit(call, unit * call.group + member);
        offset = between(kBlock - 1, kBlock + r) - kLog2E * call.lse.at(head.b, tile.first() + kBlock + r, head.h);
      }
      query_offsets[r] = offset;
    } else if constexpr (kGate) {
      key_offsets[r] = between(r, kBlock - 1);
    }
  }

  // P 2^14 (the keys' side alone needs it) and dS / score_factor, rows as this side has them.
  __device__ void weigh(uint32_t (&p)[4][4], uint32_t (&ds)[4][4]) const {
    const uint64_t own = descriptor(shared + kOwn), other = descriptor(shared + kOther);
    const uint64_t own_values = descriptor(shared + kOwnValues), other_values = descriptor(shared + kOtherValues);
    const auto along = [](int k) { return k / 64 * kBlockBytes + k % 64 * 2; };
    float s[32], dp[32];
    wgmma_fence();
    wgmma_first<0, 0>(s, own, other);
#pragma unroll
    for (int k = 16; k < K; k += 16) wgmma<0, 0>(s, advance(own, along(k)), advance(other, along(k)), true);
    wgmma_commit();
    wgmma_first<0, 0>(dp, own_values, other_values);
#pragma unroll
    for (int k = 16; k < V; k += 16) wgmma<0, 0>(dp, advance(own_values, along(k)), advance(other_values, along(k)), true);
    wgmma_commit();

    const float* offsets = floats(Memory::kOffsets);
    const float* column_offsets = offsets + (kIsQueries ? 0 : kBlock) + fragment_column();
    const float *row_deltas = floats(Memory::kDelta) + own_row(), *column_deltas = floats(Memory::kDelta) + fragment_column();
    const float score = call.scale * kLog2E * query_factor * key_factor, of_delta = -0x1p-14f / score_factor,
                product = -of_delta * d_out_factor * value_factor;
    float shift[2] = {14, 14}, sums[2] = {0, 0};
    if constexpr (kIsQueries || kGate) {
      for (int half = 0; half < 2; ++half) shift[half] += offsets[(kIsQueries ? kBlock : 0) + own_row() + 8 * half];
    }
    wgmma_wait<1>();
    hold(s);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      float2 offset = {0, 0};
      if constexpr (!kIsQueries || kGate) offset = *reinterpret_cast<const float2*>(column_offsets + i / 4 * 8);
      s[i] = exp2_fast(fmaf(s[i], score, shift[i / 2 % 2] + offset.x));
      s[i + 1] = exp2_fast(fmaf(s[i + 1], score, shift[i / 2 % 2] + offset.y));
      if constexpr (!kIsQueries) p[i / 8][i / 2 % 4] = pack(s[i], s[i + 1]);
    }
    const float of_row[2] = {row_deltas[0] * of_delta, row_deltas[8] * of_delta};
    wgmma_wait<0>();
    hold(dp);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      float2 delta = {of_row[i / 2 % 2], of_row[i / 2 % 2]};
      if constexpr (!kIsQueries) {
        const float2 of_column = *reinterpret_cast<const float2*>(column_deltas + i / 4 * 8);
        delta = {of_column.x * of_delta, of_column.y * of_delta};
      }
      const float x = s[i] * fmaf(dp[i], product, delta.x), y = s[i + 1] * fmaf(dp[i + 1], product, delta.y);
      ds[i / 8][i / 2 % 4] = pack(x, y);
      sums[i / 2 % 2] += x + y;
    }
    if constexpr (kGate) {
      float* const gate_sums = pairs.gate_sums + at_query * kTile + (kIsQueries ? kBlock : 0) + own_row();
      for (int half = 0; half < 2; ++half) {
        const float sum = row_sum(sums[half]);
        if (lane_id() % 4 == 0) gate_sums[8 * half] = (kIsQueries ? score_factor : -score_factor) * sum;
      }
    }
  }

  // Columns 64 n ... of 64 rows of `width` float32.
  __device__ static void write_columns(const float (&d)[32], float* to, int n, int width) {
    to = moved(to, own_row() * width + kBlock * n + fragment_column());
#pragma unroll
    for (int i = 0; i < 32; i += 2) __stcg(reinterpret_cast<float2*>(to + i / 2 % 2 * 8 * width + i / 4 * 8), make_float2(d[i], d[i + 1]));
  }
  __device__ static void read_columns(float (&d)[32], const float* from, int n, int width) {
    from = moved(from, own_row() * width + kBlock * n + fragment_column());
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(from + i / 2 % 2 * 8 * width + i / 4 * 8);
      d[i] = pair.x, d[i + 1] = pair.y;
    }
  }
  // The transposed block (m, n) of rows of K, on top of what was there.
  template <bool kAdds>
  __device__ static void write_transposed(float (&d)[32], float* to, int m, int n) {
    to = moved(to, (kBlock * n + fragment_column()) * K + kBlock * m + own_row());
    const auto place = [](int i) { return (i / 4 * 8 + i % 2) * K + i / 2 % 2 * 8; };
    if constexpr (kAdds) {
#pragma unroll
      for (int i = 0; i < 32; ++i) d[i] += to[place(i)];
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) __stcg(to + place(i), d[i]);
  }

  __device__ void add_dvalues(const uint32_t (&p)[4][4]) const {
    float* const to = far.d_values + at * kTile * V;
#pragma unroll 1
    for (int n = 0; n < V / 64; ++n) {
      float sum[32], d[32];
      if (!is_last() || member > 0)
        read_columns(sum, to, n, V);
      else
        zero(sum);
      zero(d);
      multiply_held<1>(d, p, shared + Memory::kDOut + n * kBlockBytes);
      add_scaled(sum, 0x1p-14f * d_out_factor, d);
      write_columns(sum, to, n, V);
    }
  }

  // dG1, or the query head's part of dG0, whose transpose it computes: own^T drows + G1^T dG.
  __device__ void add_dmatrix() const {
    float* const d_out = d_matrix(kIsQueries ? 0 : 1);
    const bool with_tile = is_last_member() && has_matrix();
#pragma unroll 1
    for (int m = 0; m < K / 64; ++m) {
      uint32_t by_tile[K / 16][4], by_rows[4][4];
      float tile_factor = 1;
      if (with_tile) tile_factor = load_as_a<kIsQueries>(by_tile, d_tile() + kBlock * m * (kIsQueries ? 1 : K), K);
      const float rows_factor = load_as_a<true>(by_rows, rows() + kBlock * m, K);
      if (with_tile && kIsQueries) wait(barrier(1), 0);
#pragma unroll 1
      for (int n = 0; n < K / 64; ++n) {
        float d[32];
        zero(d);
        multiply_held<1>(d, by_rows, shared + kOwn + n * kBlockBytes);
        scale(d, rows_factor * (kIsQueries ? query_factor : key_factor));
        if (with_tile) {
          scale(d, reciprocal_of_power(tile_factor));
          if constexpr (kIsQueries)
            multiply_held<1>(d, by_tile, shared + Memory::kMatrix1 + n * (K * 128));
          else
            multiply_held<0>(d, by_tile, shared + Memory::kMatrix0 + n * kBlockBytes, K * 128);
          scale(d, tile_factor);
        }
        if constexpr (!kIsQueries)
          write_columns(d, d_out + kBlock * m * K, n, K);
        else if (member == 0)
          write_transposed<false>(d, d_out, m, n);
        else
          write_transposed<true>(d, d_out, m, n);
      }
    }
  }

  // dq1, dk0. With the last head alone dK0 is taken in and overwritten.
  __device__ void write_drows(const uint32_t (&ds)[4][4]) const {
    const float unit_of_ds = score_factor * (kIsQueries ? key_factor : query_factor) * call.scale;
    float *const to = rows(), *const sums = pairs.key_sums + at * kBlock * K;
    uint32_t outside[K / 16][4];
    float factor = 1;
    if (kPath && has_rows() && (kIsQueries || is_last_member())) {
      factor = load_as_a<false>(outside, to, K);
      if (!kIsQueries) wait(barrier(1), 0);
    }
#pragma unroll 1
    for (int n = 0; n < K / 64; ++n) {
      float d[32];
      const auto add = [&](const float* from) {
        float x[32];
        read_columns(x, from, n, K);
        add_scaled(d, 1.f, x);
      };
      zero(d);
      multiply_held<1>(d, ds, shared + kOther + n * kBlockBytes);
      scale(d, unit_of_ds);
      if constexpr (!kPath) {
        if (has_rows() || (!kIsQueries && member > 0)) add(to);
      } else {
        if (!kIsQueries && member > 0) add(sums);
        if (!kIsQueries && !is_last_member()) {
          write_columns(d, sums, n, K);
          continue;
        }
        if (has_rows()) {
          scale(d, reciprocal_of_power(factor));
          if constexpr (kIsQueries)
            multiply_held<0>(d, outside, shared + Memory::kMatrix0 + n * kBlockBytes, K * 128);
          else
            multiply_held<1>(d, outside, shared + Memory::kMatrix1 + n * (K * 128));
          scale(d, factor);
        }
      }
      write_columns(d, to, n, K);
    }
  }

  __device__ void run() {
    key_factor = call.at.key_factors[at];
    value_factor = call.at.value_factors[at];
    for (member = 0; member < call.group; ++member) {
      at_query = slot(call, unit * call.group + member, at - unit * call.max_tiles);
      query_factor = call.at.query_factors[at_query];
      d_out_factor = far.d_out_factors[at_query];
      score_factor = fmaxf(far.score_factors[at_query], 0x1p-100f);
      if (member > 0) sync_both();
      if constexpr (!kIsQueries) {
        if (threadIdx.x == 0) copy_images();
        write_vectors();
      }
      sync_both();
      wait(barrier(0), member % 2);
      uint32_t p[4][4], ds[4][4];
      weigh(p, ds);
      if constexpr (!kIsQueries) add_dvalues(p);
      if (kPath && Memory::kMatrix1Waits && is_last_member() && !is_last()) {
        sync_both();  // V0 and dO1 are done with; and the sides go on together, so that memory is read once for both
        if (!kIsQueries && threadIdx.x == 0) {
          copy_matrix1();
          prefetch_matrix();
        }
      }
      if (kPath && has_rows() && (kIsQueries || is_last_member())) {
        add_dmatrix();
        sync_side();  // every warp has read the rows that are overwritten now
      }
      write_drows(ds);
    }
  }
};

// A CTA a tile and key head.
template <int K, int V, bool kPath, bool kGate>
__global__ void __launch_bounds__(kPairThreads, 2)
    differentiate_pairs(const __grid_constant__ Call call, const __grid_constant__ FarGradient far, const __grid_constant__ PairGradients pairs) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tile tile = call.at.tiles[blockIdx.x];
  if (blockIdx.x >= *call.at.num_tiles) return;
  const int64_t unit = blockIdx.y, at = slot(call, unit, blockIdx.x);
  if (tile.count <= kBlock) {
    if constexpr (kGate) {
      for (int member = 0; threadIdx.x < kTile && member < call.group; ++member)
        pairs.gate_sums[slot(call, unit * call.group + member, blockIdx.x) * kTile + threadIdx.x] = 0;
    }
    return;
  }
  if (threadIdx.x == 0) {
    auto* const barriers = reinterpret_cast<uint64_t*>(shared + PairMemory<K, V>::kBarriers);
    init_barrier(barriers, 1);
    init_barrier(barriers + 1, 1);
    init_barrier(barriers + 2, kPairThreads / 32);
    fence_barrier_init();
  }
  __syncthreads();
  if (__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) == 0)
    PairSide<K, V, kPath, kGate, false>{call, far, pairs, shared, tile, unit, at}.run();
  else
    PairSide<K, V, kPath, kGate, true>{call, far, pairs, shared, tile, unit, at}.run();
}

template <int K, int V>
cudaError_t launch_pair_gradients(const Call& call, const FarGradient& far, const PairGradients& pairs, cudaStream_t stream) {
  const auto kernel = call.w.data ? (call.g.data ? differentiate_pairs<K, V, true, true> : differentiate_pairs<K, V, true, false>)
                                  : (call.g.data ? differentiate_pairs<K, V, false, true> : differentiate_pairs<K, V, false, false>);
  constexpr int kBytes = PairMemory<K, V>::kTotal;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) return error;
  kernel<<<dim3(static_cast<unsigned>(call.max_tiles), far.num_units), kPairThreads, kBytes, stream>>>(call, far, pairs);
  return cudaGetLastError();
}

}  // namespace pathattn::cuda::hopper
