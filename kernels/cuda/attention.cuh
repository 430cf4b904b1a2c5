// Forward attention of one tile of queries: its own tile, then earlier tiles of its chunk, then earlier chunks, right to left.
#pragma once

#include "kernels/cuda/prepare.cuh"

namespace pathattn::cuda {

// A [kTile][D + 4] array in shared memory.
template <int D>
inline constexpr int kWide = kTile*(D + 4);
inline constexpr int kScoreRow = kTile + 4;
inline constexpr int kScores = kTile * kScoreRow;

// Queries carried to their tile's start, in `queries` (kWide<D>), and the scores inside the tile before scale and mask. Without w: q as it is.
template <int D, bool kPath>
__device__ void start_queries(const Call& call, const Unit& unit, const Unit& keys, const Tile& tile, float* queries, float* scratch,
                              Block<64>& scores, float* slab) {
  const TileRows q = rows_of(call.q, unit, tile, call.K), k = rows_of(call.k, keys, tile, call.K);
  scores.clear();
  multiply<Along::kDepth, Along::kDepth>(
      scores, call.K, q, [&](int p, int j) { return k(j, p); }, slab);
  for (int e = threadIdx.x; e < kTile * D; e += kThreads) queries[e / D * (D + 4) + e % D] = q(e / D, e % D);
  __syncthreads();
  if constexpr (kPath) {
    const TileRows w = rows_of(call.w, keys, tile, call.K);
    const float* u = call.at.u + row_of<D>(call, keys, tile.first());
    const float* x = call.at.x + (keys.local * call.T + tile.first()) * kTile;
    Block<64> qw;
    qw.clear();
    multiply<Along::kDepth, Along::kDepth>(
        qw, call.K, q, [&](int p, int j) { return w(j, p); }, slab);
    qw.for_each([&](int i, int j, float& value) { scratch[i * kScoreRow + j] = j <= i ? -value : 0.f; });
    const auto minus_qw = [&](int i, int p) { return scratch[i * kScoreRow + p]; };
    multiply<Along::kDepth, Along::kOther>(
        scores, tile.count, minus_qw, [&](int p, int j) { return x[p * kTile + j]; }, slab);
    Block<D> change;
    change.clear();
    multiply<Along::kDepth, Along::kOther>(
        change, tile.count, minus_qw, [&](int p, int j) { return u[p * D + j]; }, slab);
    change.for_each([&](int i, int j, float& value) { queries[i * (D + 4) + j] += value; });
    __syncthreads();
  }
}

// queries <- queries matrix
template <int D>
__device__ void carry_rows(float* queries, const float* matrix, float* slab) {
  Block<D> carried;
  carried.clear();
  multiply<Along::kDepth, Along::kOther>(
      carried, D, [&](int i, int p) { return queries[i * (D + 4) + p]; }, [&](int p, int j) { return matrix[p * D + j]; }, slab);
  carried.for_each([&](int i, int j, float& value) { queries[i * (D + 4) + j] = value; });
  __syncthreads();
}

// Online softmax of a thread's four rows.
template <int D>
struct Softmax {
  Block<D> out;
  float highest[4], sum[4];

  __device__ Softmax() {
    out.clear();
    for (int r = 0; r < 4; ++r) highest[r] = -INFINITY, sum[r] = 0;
  }

  // scores: scaled and masked (-inf). value(p, j): row p of the values.
  template <typename Value>
  __device__ void add(Block<64>& scores, int count, Value value, float* weights, float* slab) {
    const int ty = threadIdx.x / 16;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float top = highest[r];
#pragma unroll
      for (int c = 0; c < 4; ++c) top = fmaxf(top, scores.x[0][r][c]);
      top = row_max(top);
      const float base = top == -INFINITY ? 0.f : top;  // a row that has seen no key yet
      const float shrink = expf(highest[r] - base);
      float part = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float e = expf(scores.x[0][r][c] - base);
        part += e;
        weights[(4 * ty + r) * kScoreRow + 4 * (threadIdx.x % 16) + c] = e;
      }
      sum[r] = sum[r] * shrink + row_sum(part);
      highest[r] = top;
#pragma unroll
      for (int b = 0; b < D / 64; ++b)
#pragma unroll
        for (int c = 0; c < 4; ++c) out.x[b][r][c] *= shrink;
    }
    multiply<Along::kDepth, Along::kOther>(
        out, count, [&](int i, int p) { return weights[i * kScoreRow + p]; }, value, slab);
  }
};

// Keys that queries of another tile meet: carried to the tile's end (same chunk), to the chunk's end, or as they are.
template <int D, bool kPath>
struct KeyRows {
  const float* carried;
  TileRows raw;
  __device__ KeyRows(const Call& call, const Unit& keys, const Tile& queries, const Tile& tile)
      : carried(kPath ? (queries.chunk() == tile.chunk() ? call.at.tile_keys : call.at.chunk_keys) + row_of<D>(call, keys, tile.first()) : nullptr),
        raw(rows_of(call.k, keys, tile, call.K)) {}
  __device__ float operator()(int row, int column) const {
    if constexpr (kPath) return carried[row * D + column];
    return raw(row, column);
  }
};

// An earlier tile of the same document; only the last tile of a document is not full.
__device__ inline Tile sibling(const Tile& tile, int index) {
  return {tile.document, index, tile.num_tiles, index == tile.index ? tile.count : kTile};
}

template <int D, bool kPath>
__global__ void __launch_bounds__(kThreads, 1) attend(Call call) {
  extern __shared__ float shared[];
  float *slab = shared, *weights = slab + kSlabFloats<D>, *queries = weights + kScores;
  const int id = *call.at.num_tiles - 1 - static_cast<int>(blockIdx.x);  // long rows first
  if (id < 0) return;
  const Tile tile = call.at.tiles[id];
  const Unit unit = query_unit(call, blockIdx.y), keys = key_unit(call, blockIdx.y / call.group);
  const bool gated = call.g.data != nullptr;
  const float2* sums = gated ? call.at.gate_sums + unit.local * call.T : nullptr;

  Block<64> scores;
  Softmax<D> softmax;
  start_queries<D, kPath>(call, unit, keys, tile, queries, weights, scores, slab);
  scores.for_each([&](int i, int j, float& s) {
    s = j > i || i >= tile.count ? -INFINITY : call.scale * s + (gated ? decay(call, sums, tile.first() + i, tile.first() + j) : 0.f);
  });
  const TileRows own_values = rows_of(call.v, keys, tile, call.V);
  softmax.add(scores, tile.count, own_values, weights, slab);

  for (int t = tile.index - 1; t >= 0; --t) {
    const Tile other = sibling(tile, t);
    if constexpr (kPath) {  // to the start of the tile or chunk just left
      const Tile left = sibling(tile, t + 1);
      if (left.index != tile.index && left.chunk() == tile.chunk()) {
        carry_rows<D>(queries, call.at.tile_g + tile_matrix<D>(call, keys.local, left.first()), slab);
      } else if (left.index % kChunkTiles == 0 && left.chunk() != tile.chunk()) {
        carry_rows<D>(queries, call.at.chunk_g + chunk_matrix<D>(call, keys.local, left.first()), slab);
      }
    }
    const KeyRows<D, kPath> k(call, keys, tile, other);
    scores.clear();
    multiply<Along::kDepth, Along::kDepth>(
        scores, kPath ? D : call.K, [&](int i, int p) { return queries[i * (D + 4) + p]; }, [&](int p, int j) { return k(j, p); }, slab);
    scores.for_each([&](int i, int j, float& s) {
      s = i >= tile.count ? -INFINITY : call.scale * s + (gated ? decay(call, sums, tile.first() + i, other.first() + j) : 0.f);
    });
    softmax.add(scores, kTile, rows_of(call.v, keys, other, call.V), weights, slab);
  }

  softmax.out.for_each([&](int i, int j, float& o) {
    if (i >= tile.count || j >= call.V) return;
    const float exact = o / softmax.sum[i % 4];
    call.out.set(unit.b, tile.first() + i, unit.h, j, exact);
    if (call.out_rest.data) call.out_rest.set(unit.b, tile.first() + i, unit.h, j, exact - call.out.at(unit.b, tile.first() + i, unit.h, j));
  });
  if (threadIdx.x % 16 == 0) {
    for (int r = 0; r < 4; ++r) {
      const int i = 4 * (threadIdx.x / 16) + r;
      if (i < tile.count) call.lse.set(unit.b, tile.first() + i, unit.h, 0, softmax.highest[r] + logf(softmax.sum[r]));
    }
  }
}

}  // namespace pathattn::cuda
