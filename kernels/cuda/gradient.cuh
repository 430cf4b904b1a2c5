// Backward between a tile of queries and a tile of keys, and the stages whose pairs stand in different chunks.
#pragma once

#include "kernels/cuda/attention.cuh"

namespace pathattn::cuda {

// A pair of tiles of one document; queries belong to `unit`, keys to `keys`.
struct Pair {
  const Call& call;
  Unit unit, keys;
  Tile query_tile, key_tile;
  __device__ bool own() const { return query_tile.index == key_tile.index; }
  __device__ TileRows values() const { return rows_of(call.v, keys, key_tile, call.V); }
  __device__ TileRows output_gradients() const { return rows_of(call.d_out, unit, query_tile, call.V); }
  __device__ int64_t query_row(int i) const { return unit.local * call.T + query_tile.first() + i; }
  __device__ int64_t key_row(int j) const { return unit.local * call.T + key_tile.first() + j; }  // of column_sums: a query head's
  // exp(score - lse) of query i and key j from their raw score.
  __device__ float weight(int i, int j, float score) const {
    if (i >= query_tile.count || j >= key_tile.count || (own() && j > i)) return 0;
    float s = call.scale * score;
    if (call.g.data) s += decay(call, call.at.gate_sums + unit.local * call.T, query_tile.first() + i, key_tile.first() + j);
    return expf(s - call.lse.at(unit.b, query_tile.first() + i, unit.h));
  }
};

// rows[i * D + j] += block, for i < count.
template <int D>
__device__ void add_rows(Block<D>& block, float* rows, int count) {
  block.for_each([&](int i, int j, float& value) {
    if (i < count) rows[i * D + j] += value;
  });
}

// From the raw scores of queries x keys: dv += P^T d_o, then `scores` = `square` = gradient of the raw scores. Sums of dS are added up where gates
// need them.
template <int D>
__device__ void score_gradients(const Pair& pair, Block<64>& scores, float* square, float* dv, float* slab) {
  const Call& call = pair.call;
  scores.for_each([&](int i, int j, float& s) { square[i * kScoreRow + j] = s = pair.weight(i, j, s); });
  const TileRows d_out = pair.output_gradients(), values = pair.values();
  if (dv != nullptr) {
    Block<D> part;
    part.clear();
    multiply<Along::kOther, Along::kOther>(
        part, pair.query_tile.count, [&](int i, int p) { return square[p * kScoreRow + i]; }, d_out, slab);
    add_rows<D>(part, dv, pair.key_tile.count);
  }
  Block<64> dp;
  dp.clear();
  multiply<Along::kDepth, Along::kDepth>(
      dp, call.V, d_out, [&](int p, int j) { return values(j, p); }, slab);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = 4 * (threadIdx.x / 16) + r;
    const float delta = i < pair.query_tile.count ? call.at.delta[pair.query_row(i)] : 0.f;
    float sum = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float weight = scores.x[0][r][c], ds = weight == 0.f ? 0.f : weight * (dp.x[0][r][c] - delta);
      sum += ds;
      scores.x[0][r][c] = ds;
      square[i * kScoreRow + 4 * (threadIdx.x % 16) + c] = ds;
    }
    if (call.g.data) {
      sum = row_sum(sum);
      if (threadIdx.x % 16 == 0 && i < pair.query_tile.count) call.at.row_sums[pair.query_row(i)] += sum;
    }
  }
  __syncthreads();
}

// column_sums += sums over queries of `square`, which holds dS before the factor scale.
__device__ inline void add_column_sums(const Pair& pair, const float* square) {
  if (pair.call.g.data == nullptr || threadIdx.x >= pair.key_tile.count) return;
  float sum = 0;
  for (int i = 0; i < kTile; ++i) sum += square[i * kScoreRow + threadIdx.x];
  pair.call.at.column_sums[pair.key_row(threadIdx.x)] += sum;
}

// dq += scale dS keys
template <int D, typename Keys>
__device__ void add_query_gradient(const Call& call, Block<D>& dq, const float* square, int num_keys, Keys keys, float* slab) {
  multiply<Along::kDepth, Along::kOther>(
      dq, num_keys, [&](int i, int p) { return call.scale * square[i * kScoreRow + p]; }, keys, slab);
}

template <int D>
__device__ void keep(Block<D>& block, float* wide) {
  block.for_each([&](int i, int j, float& value) { wide[i * (D + 4) + j] = value; });
}

// block <- (wide) matrix, or its transpose; `wide` is the block's copy in shared memory.
template <int D, bool kTransposed>
__device__ void carry_block(Block<D>& block, const float* wide, const float* matrix, float* slab) {
  block.clear();
  const auto row = [&](int i, int p) { return wide[i * (D + 4) + p]; };
  if constexpr (kTransposed) {
    multiply<Along::kDepth, Along::kDepth>(
        block, D, row, [&](int p, int j) { return matrix[j * D + p]; }, slab);
  } else {
    multiply<Along::kDepth, Along::kOther>(
        block, D, row, [&](int p, int j) { return matrix[p * D + j]; }, slab);
  }
}

// to (row-major [kTile, D] in global memory) = from matrix, or its transpose
template <int D, bool kTransposed>
__device__ void carry_link(const float* from, const float* matrix, float* to, float* slab) {
  Block<D> block;
  block.clear();
  const auto row = [&](int i, int p) { return from[i * D + p]; };
  if constexpr (kTransposed) {
    multiply<Along::kDepth, Along::kDepth>(
        block, D, row, [&](int p, int j) { return matrix[j * D + p]; }, slab);
  } else {
    multiply<Along::kDepth, Along::kOther>(
        block, D, row, [&](int p, int j) { return matrix[p * D + j]; }, slab);
  }
  block.for_each([&](int i, int j, float& value) { to[i * D + j] = value; });
}

template <int D>
__device__ float* chain_of(const Call& call) {
  return call.at.chain + (int64_t{blockIdx.y} * call.slots + blockIdx.x) * (call.T / kChunk + 1) * kTile * D;
}

// Queries to their chunk's start.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) carry_queries(Call call) {
  extern __shared__ float shared[];
  float *slab = shared, *square = slab + kSlabFloats<D>, *queries = square + kScores;
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  if (tile.chunk() == 0) return;
  const Unit unit = query_unit(call, blockIdx.y), keys = key_unit(call, blockIdx.y / call.group);
  Block<64> scores;
  start_queries<D, true>(call, unit, keys, tile, queries, square, scores, slab);
  for (int t = tile.index - 1; t >= tile.chunk() * kChunkTiles; --t)
    carry_rows<D>(queries, call.at.tile_g + tile_matrix<D>(call, keys.local, sibling(tile, t).first()), slab);
  for (int e = threadIdx.x; e < tile.count * D; e += kThreads)
    call.at.q_chunk[row_of<D>(call, unit, tile.first()) + e] = queries[e / D * (D + 4) + e % D];
}

// Gradient of q_chunk from the keys of earlier chunks. A CTA takes every slots-th tile.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) far_queries(Call call) {
  extern __shared__ float shared[];
  float *slab = shared, *square = slab + kSlabFloats<D>, *wide = square + kScores;
  float* const chain = chain_of<D>(call);
  const Unit unit = query_unit(call, blockIdx.y), keys = key_unit(call, blockIdx.y / call.group);
  for (int id = blockIdx.x; id < *call.at.num_tiles; id += call.slots) {
    const Tile tile = call.at.tiles[id];
    const int chunk = tile.chunk();
    const int64_t row = row_of<D>(call, unit, tile.first());
    const auto chunk_g = [&](int c) { return call.at.chunk_g + chunk_matrix<D>(call, keys.local, tile.document + int64_t{c} * kChunk); };
    const auto link = [&](int c) { return chain + int64_t{c} * kTile * D; };  // queries as they meet chunk c
    if (chunk > 0)
      for (int e = threadIdx.x; e < kTile * D; e += kThreads) link(chunk - 1)[e] = e / D < tile.count ? call.at.q_chunk[row + e] : 0.f;
    for (int c = chunk - 1; c > 0; --c) carry_link<D, false>(link(c), chunk_g(c), link(c - 1), slab);
    Block<D> dq;
    dq.clear();
    for (int c = 0; c < chunk; ++c) {
      if (c > 0) {
        keep<D>(dq, wide);
        carry_block<D, true>(dq, wide, chunk_g(c), slab);
      }
      for (int t = 0; t < kChunkTiles; ++t) {
        const Pair pair{call, unit, keys, tile, sibling(tile, c * kChunkTiles + t)};
        const float *queries = link(c), *k = call.at.chunk_keys + row_of<D>(call, keys, pair.key_tile.first());
        Block<64> scores;
        scores.clear();
        multiply<Along::kDepth, Along::kDepth>(
            scores, D, [&](int i, int p) { return queries[i * D + p]; }, [&](int p, int j) { return k[j * D + p]; }, slab);
        score_gradients<D>(pair, scores, square, nullptr, slab);
        add_query_gradient<D>(
            call, dq, square, kTile, [&](int p, int j) { return k[p * D + j]; }, slab);
      }
    }
    dq.for_each([&](int i, int j, float& value) {
      if (i < tile.count) call.at.dq[row + i * D + j] = value;
    });
    __syncthreads();
  }
}

// Gradients of a key tile from one tile of queries, from the raw scores of keys x queries: dv and dk in registers.
template <int D, typename Queries>
__device__ void add_key_gradients(const Pair& pair, Block<64>& scores, Block<D>& dk, Block<D>& dv, Queries queries, float* square, float* slab) {
  const Call& call = pair.call;
  scores.for_each([&](int j, int i, float& s) { square[j * kScoreRow + i] = s = pair.weight(i, j, s); });
  const TileRows d_out = pair.output_gradients();
  const auto entry = [&](int j, int p) { return square[j * kScoreRow + p]; };
  multiply<Along::kDepth, Along::kOther>(dv, pair.query_tile.count, entry, d_out, slab);
  Block<64> dp;
  dp.clear();
  multiply<Along::kDepth, Along::kDepth>(
      dp, call.V, pair.values(), [&](int p, int i) { return d_out(i, p); }, slab);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int j = 4 * (threadIdx.x / 16) + r;
    float sum = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = 4 * (threadIdx.x % 16) + c;
      const float weight = scores.x[0][r][c], ds = weight == 0.f ? 0.f : weight * (dp.x[0][r][c] - call.at.delta[pair.query_row(i)]);
      sum += ds;
      square[j * kScoreRow + i] = call.scale * ds;
    }
    if (call.g.data) {
      sum = row_sum(sum);
      if (threadIdx.x % 16 == 0 && j < pair.key_tile.count) call.at.column_sums[pair.key_row(j)] += sum;
    }
  }
  multiply<Along::kDepth, Along::kOther>(dk, pair.query_tile.count, entry, queries, slab);
}

// Gradients of chunk_keys, values and chunk_g from the queries of later chunks. A CTA takes every slots-th tile.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) far_keys(Call call) {
  extern __shared__ float shared[];
  float *slab = shared, *square = slab + kSlabFloats<D>, *wide = square + kScores;
  float* const chain = chain_of<D>(call);
  const Unit keys = key_unit(call, blockIdx.y);
  for (int id = blockIdx.x; id < *call.at.num_tiles; id += call.slots) {
    const Tile tile = call.at.tiles[id];
    const int chunk = tile.chunk();
    const int64_t row = row_of<D>(call, keys, tile.first());
    const auto token = [&](int c) { return tile.document + int64_t{c} * kChunk; };
    const auto chunk_g = [&](int c) { return call.at.chunk_g + chunk_matrix<D>(call, keys.local, token(c)); };
    const auto link = [&](int c) { return chain + int64_t{c - chunk - 1} * kTile * D; };  // keys as chunk c meets them
    const int last = tile.num_chunks() - 1;
    if (chunk < last)
      for (int e = threadIdx.x; e < kTile * D; e += kThreads) link(chunk + 1)[e] = call.at.chunk_keys[row + e];
    for (int c = chunk + 1; c < last; ++c) carry_link<D, true>(link(c), chunk_g(c), link(c + 1), slab);
    Block<D> dk, dv;
    dk.clear();
    dv.clear();
    for (int c = last; c > chunk; --c) {
      const float* k = link(c);
      if (c < last) {
        keep<D>(dk, wide);
        float* dg = call.at.dchunk_g + chunk_matrix<D>(call, keys.local * call.slots + blockIdx.x, token(c));
        for (int r = 0; r < D; r += kTile) {
          Block<D> part;
          part.clear();
          multiply<Along::kOther, Along::kOther>(
              part, kTile, [&](int i, int p) { return wide[p * (D + 4) + r + i]; }, [&](int p, int j) { return k[p * D + j]; }, slab);
          add_rows<D>(part, dg + r * D, kTile);
        }
        carry_block<D, false>(dk, wide, chunk_g(c), slab);
      }
      for (int a = 0; a < call.group; ++a) {
        const Unit unit = query_unit(call, int64_t{blockIdx.y} * call.group + a);
        for (int t = c * kChunkTiles; t < min((c + 1) * kChunkTiles, tile.num_tiles); ++t) {
          const Tile query_tile = call.at.tiles[id + t - tile.index];
          const Pair pair{call, unit, keys, query_tile, tile};
          const float* q = call.at.q_chunk + row_of<D>(call, unit, query_tile.first());
          Block<64> scores;
          scores.clear();
          multiply<Along::kDepth, Along::kDepth>(
              scores, D, [&](int j, int p) { return k[j * D + p]; }, [&](int p, int i) { return i < query_tile.count ? q[i * D + p] : 0.f; }, slab);
          add_key_gradients<D>(
              pair, scores, dk, dv, [&](int p, int j) { return q[p * D + j]; }, square, slab);
        }
      }
    }
    dk.for_each([&](int i, int j, float& value) {
      if (i < tile.count) call.at.dk[row + i * D + j] = value;
    });
    dv.for_each([&](int i, int j, float& value) {
      if (i < tile.count) call.at.dv[row + i * D + j] = value;
    });
    __syncthreads();
  }
}

// Without w: gradients of a key tile from its own and all later queries.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) plain_keys(Call call) {
  extern __shared__ float shared[];
  float *slab = shared, *square = slab + kSlabFloats<D>;
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  const Unit keys = key_unit(call, blockIdx.y);
  const TileRows k = rows_of(call.k, keys, tile, call.K);
  Block<D> dk, dv;
  dk.clear();
  dv.clear();
  for (int a = 0; a < call.group; ++a) {
    const Unit unit = query_unit(call, int64_t{blockIdx.y} * call.group + a);
    for (int t = tile.index; t < tile.num_tiles; ++t) {
      const Pair pair{call, unit, keys, call.at.tiles[blockIdx.x + t - tile.index], tile};
      const TileRows q = rows_of(call.q, unit, pair.query_tile, call.K);
      Block<64> scores;
      scores.clear();
      multiply<Along::kDepth, Along::kDepth>(
          scores, call.K, k, [&](int p, int i) { return q(i, p); }, slab);
      add_key_gradients<D>(pair, scores, dk, dv, q, square, slab);
    }
  }
  dk.for_each([&](int j, int c, float& value) {
    if (j < tile.count && c < call.K) call.dk.set(keys.b, tile.first() + j, keys.h, c, value);
  });
  dv.for_each([&](int j, int c, float& value) {
    if (j < tile.count && c < call.V) call.dv.set(keys.b, tile.first() + j, keys.h, c, value);
  });
}

// Without w: the gradient of a query tile.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) plain_queries(Call call) {
  extern __shared__ float shared[];
  float *slab = shared, *square = slab + kSlabFloats<D>;
  const int id = *call.at.num_tiles - 1 - static_cast<int>(blockIdx.x);
  if (id < 0) return;
  const Tile tile = call.at.tiles[id];
  const Unit unit = query_unit(call, blockIdx.y), keys = key_unit(call, blockIdx.y / call.group);
  const TileRows q = rows_of(call.q, unit, tile, call.K);
  Block<D> dq;
  dq.clear();
  for (int t = 0; t <= tile.index; ++t) {
    const Pair pair{call, unit, keys, tile, sibling(tile, t)};
    const TileRows k = rows_of(call.k, keys, pair.key_tile, call.K);
    Block<64> scores;
    scores.clear();
    multiply<Along::kDepth, Along::kDepth>(
        scores, call.K, q, [&](int p, int j) { return k(j, p); }, slab);
    score_gradients<D>(pair, scores, square, nullptr, slab);
    add_query_gradient<D>(call, dq, square, pair.key_tile.count, k, slab);
  }
  dq.for_each([&](int i, int c, float& value) {
    if (i < tile.count && c < call.K) call.dq.set(unit.b, tile.first() + i, unit.h, c, value);
  });
}

}  // namespace pathattn::cuda
