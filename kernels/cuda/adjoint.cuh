// Backward inside chunks: the triangle of attention, the adjoint of carrying keys to the chunk's end, and that of each tile's UT transform.
#pragma once

#include "kernels/cuda/gradient.cuh"

namespace pathattn::cuda {

// Adjoint of carry_keys for a chunk that is not its document's last: dk from chunk_keys' to tile_keys' gradient, dtile_g set.
template <int D>
__device__ void uncarry_keys(const Call& call, const Unit& keys, const Tile& tile, float* slab) {
  const auto matrix = [&](float* base, int t) { return base + tile_matrix<D>(call, keys.local, tile.first() + t * kTile); };
  const auto partial = [&](int slot) { return call.at.dchunk_g + chunk_matrix<D>(call, keys.local * call.slots + slot, tile.first()); };
  float* const dsuffix = partial(0);  // of the product of the tiles from t on
  for (int e = threadIdx.x; e < D * D; e += kThreads)
    for (int slot = 1; slot < call.slots; ++slot) dsuffix[e] += partial(slot)[e];
  __syncthreads();
  for (int t = 0; t < kChunkTiles; ++t) {
    const float *suffix = matrix(call.at.suffix, t), *g = matrix(call.at.tile_g, t);
    float* dg = matrix(call.at.dtile_g, t);
    Block<D> block;
    for (int r = 0; r < D; r += kTile) {
      block.clear();
      multiply<Along::kOther, Along::kOther>(
          block, D, [&](int i, int p) { return suffix[p * D + r + i]; }, [&](int p, int j) { return dsuffix[p * D + j]; }, slab);
      block.for_each([&](int i, int j, float& value) { dg[(r + i) * D + j] = value; });
    }
    const int64_t row = row_of<D>(call, keys, tile.first() + t * kTile);
    float *dk = call.at.dk + row, *k = call.at.tile_keys + row;
    for (int r = 0; r < D; r += kTile) {
      block.clear();
      multiply<Along::kDepth, Along::kDepth>(
          block, D, [&](int i, int p) { return dsuffix[(r + i) * D + p]; }, [&](int p, int j) { return g[j * D + p]; }, slab);
      multiply<Along::kOther, Along::kOther>(
          block, kTile, [&](int i, int p) { return dk[p * D + r + i]; }, [&](int p, int j) { return k[p * D + j]; }, slab);
      block.for_each([&](int i, int j, float& value) { dsuffix[(r + i) * D + j] = value; });
    }
    block.clear();
    multiply<Along::kDepth, Along::kOther>(
        block, D, [&](int i, int p) { return dk[i * D + p]; }, [&](int p, int j) { return suffix[p * D + j]; }, slab);
    block.for_each([&](int i, int j, float& value) { dk[i * D + j] = value; });
    __syncthreads();
  }
}

// One CTA a chunk and key head: gradients of tile_keys (dk), values (dv), tile_g (dtile_g), queries at their tile's start (dq), scores inside tiles
// (da).
template <int D>
__global__ void __launch_bounds__(kThreads, 1) chunk_gradients(Call call) {
  extern __shared__ float shared[];
  float *slab = shared, *square = slab + kSlabFloats<D>, *wide = square + kScores;
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile first = call.at.tiles[blockIdx.x];
  if (first.index % kChunkTiles != 0) return;
  const Unit keys = key_unit(call, blockIdx.y);
  const int num_tiles = min(kChunkTiles, first.num_tiles - first.index);
  const bool last_chunk = first.chunk() + 1 == first.num_chunks();
  const auto tile_at = [&](int t) { return call.at.tiles[blockIdx.x + t]; };
  const auto matrix = [&](float* base, int t) { return base + tile_matrix<D>(call, keys.local, first.first() + t * kTile); };
  if (last_chunk) {
    for (int t = 0; t + 1 < num_tiles; ++t)
      for (int e = threadIdx.x; e < D * D; e += kThreads) matrix(call.at.dtile_g, t)[e] = 0;
    __syncthreads();
  } else {
    uncarry_keys<D>(call, keys, first, slab);
  }

  float* const chain = call.at.du + row_of<D>(call, keys, first.first());  // du comes into use after this kernel
  for (int a = 0; a < call.group; ++a) {
    const Unit unit = query_unit(call, int64_t{blockIdx.y} * call.group + a);
    for (int t = 0; t < num_tiles; ++t) {
      const Tile tile = tile_at(t);
      const int64_t row = row_of<D>(call, unit, tile.first());
      Block<64> scores;
      start_queries<D, true>(call, unit, keys, tile, wide, square, scores, slab);
      const auto link = [&](int u) { return chain + u * kTile * D; };  // queries as they meet tile u of the chunk
      if (t > 0)
        for (int e = threadIdx.x; e < kTile * D; e += kThreads) link(t - 1)[e] = wide[e / D * (D + 4) + e % D];
      score_gradients<D>({call, unit, keys, tile, tile}, scores, square, call.at.dv + row_of<D>(call, keys, tile.first()), slab);
      add_column_sums({call, unit, keys, tile, tile}, square);
      scores.for_each([&](int i, int j, float& ds) {
        if (i < tile.count) call.at.da[(unit.local * call.T + tile.first() + i) * kTile + j] = call.scale * ds;
      });
      for (int u = t - 1; u > 0; --u) carry_link<D, false>(link(u), matrix(call.at.tile_g, u), link(u - 1), slab);

      Block<D> dq;
      dq.for_each([&](int i, int j, float& value) { value = i < tile.count ? call.at.dq[row + i * D + j] : 0.f; });
      for (int u = 0; u < t; ++u) {
        const Tile key_tile = tile_at(u);
        const Pair pair{call, unit, keys, tile, key_tile};
        const float *queries = link(u), *k = call.at.tile_keys + row_of<D>(call, keys, key_tile.first());
        __syncthreads();
        keep<D>(dq, wide);
        float* dg = matrix(call.at.dtile_g, u);
        for (int r = 0; r < D; r += kTile) {
          Block<D> part;
          part.clear();
          multiply<Along::kOther, Along::kOther>(
              part, tile.count, [&](int i, int p) { return queries[p * D + r + i]; }, [&](int p, int j) { return wide[p * (D + 4) + j]; }, slab);
          add_rows<D>(part, dg + r * D, kTile);
        }
        carry_block<D, true>(dq, wide, matrix(call.at.tile_g, u), slab);
        scores.clear();
        multiply<Along::kDepth, Along::kDepth>(
            scores, D, [&](int i, int p) { return queries[i * D + p]; }, [&](int p, int j) { return k[j * D + p]; }, slab);
        score_gradients<D>(pair, scores, square, call.at.dv + row_of<D>(call, keys, key_tile.first()), slab);
        add_column_sums(pair, square);
        add_query_gradient<D>(
            call, dq, square, kTile, [&](int p, int j) { return k[p * D + j]; }, slab);
        Block<D> dk;
        dk.clear();
        multiply<Along::kOther, Along::kOther>(
            dk, tile.count, [&](int j, int p) { return call.scale * square[p * kScoreRow + j]; }, [&](int p, int c) { return queries[p * D + c]; },
            slab);
        add_rows<D>(dk, call.at.dk + row_of<D>(call, keys, key_tile.first()), kTile);
      }
      dq.for_each([&](int i, int j, float& value) {
        if (i < tile.count) call.at.dq[row + i * D + j] = value;
      });
      __syncthreads();
    }
  }
}

// One CTA a tile and key head: gradients of q, k, v, w, beta from dq, dk, dv, da and dtile_g. docs/mathematics.md, "Adjoint of a tile", has the
// names.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) tile_gradients(Call call) {
  extern __shared__ float shared[];
  float *slab = shared, *n = slab + kSlabFloats<D>, *y = n + kSquare, *square = y + kSquare, *rx = square + kScores, *beta = rx + kScores;
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  const int count = tile.count;
  const Unit keys = key_unit(call, blockIdx.y);
  const int64_t first = tile.first(), row = row_of<D>(call, keys, first);
  const TileRows w = rows_of(call.w, keys, tile, call.K), k = rows_of(call.k, keys, tile, call.K);
  if (threadIdx.x < kTile) beta[threadIdx.x] = threadIdx.x < count ? call.beta.at(keys.b, first + threadIdx.x, keys.h) : 0.f;
  tile_inverse<D>(call, w, beta, n, y, slab);
  const float *u = call.at.u + row, *x = call.at.x + (keys.local * call.T + first) * kTile;
  float *dk = call.at.dk + row, *du = call.at.du + row, *rw = call.at.rw + row;
  const auto from_square = [&](int i, int p) { return square[i * kScoreRow + p]; };
  const auto from_square_transposed = [&](int i, int p) { return square[p * kScoreRow + i]; };
  // A tensor's gradient is gathered in its float32 output.
  const auto add_dw = [&](Block<D>& block, bool set) {
    block.for_each([&](int i, int j, float& value) {
      if (i < count && j < call.K) call.dw.set(keys.b, first + i, keys.h, j, value + (set ? 0.f : call.dw.at(keys.b, first + i, keys.h, j)));
    });
  };

  // dW = -X dK - U dG^T,   dU = -W dG - ...,   dX = -W dK^T - ...
  Block<D> wide;
  wide.clear();
  multiply<Along::kDepth, Along::kOther>(
      wide, count, [&](int i, int p) { return i < count ? -x[i * kTile + p] : 0.f; }, [&](int p, int j) { return dk[p * D + j]; }, slab);
  const bool carried = tile.index + 1 < tile.num_tiles;
  const float* dg = call.at.dtile_g + tile_matrix<D>(call, keys.local, first);
  if (carried)
    multiply<Along::kDepth, Along::kDepth>(
        wide, D, [&](int i, int p) { return i < count ? -u[i * D + p] : 0.f; }, [&](int p, int j) { return dg[j * D + p]; }, slab);
  add_dw(wide, true);
  Block<64> dx;
  dx.clear();
  multiply<Along::kDepth, Along::kDepth>(
      dx, call.K, [&](int i, int p) { return -w(i, p); }, [&](int p, int j) { return j < count ? dk[j * D + p] : 0.f; }, slab);
  wide.clear();
  if (carried)
    multiply<Along::kDepth, Along::kOther>(
        wide, call.K, [&](int i, int p) { return -w(i, p); }, [&](int p, int j) { return dg[p * D + j]; }, slab);
  wide.for_each([&](int i, int j, float& value) {
    if (i < count) du[i * D + j] = value;
  });

  for (int a = 0; a < call.group; ++a) {
    const Unit unit = query_unit(call, int64_t{blockIdx.y} * call.group + a);
    const TileRows q = rows_of(call.q, unit, tile, call.K);
    const float *dq = call.at.dq + row_of<D>(call, unit, first), *da = call.at.da + (unit.local * call.T + first) * kTile;
    Block<64> qw;
    qw.clear();
    multiply<Along::kDepth, Along::kDepth>(
        qw, call.K, q, [&](int p, int j) { return w(j, p); }, slab);
    qw.for_each([&](int i, int j, float& value) { square[i * kScoreRow + j] = j <= i ? -value : 0.f; });
    multiply<Along::kOther, Along::kOther>(
        dx, count, from_square_transposed, [&](int p, int j) { return da[p * kTile + j]; }, slab);
    wide.clear();
    multiply<Along::kOther, Along::kOther>(
        wide, count, from_square_transposed, [&](int p, int j) { return dq[p * D + j]; }, slab);
    add_rows<D>(wide, du, count);

    qw.clear();
    multiply<Along::kDepth, Along::kDepth>(
        qw, D, [&](int i, int p) { return i < count ? -dq[i * D + p] : 0.f; }, [&](int p, int j) { return j < count ? u[j * D + p] : 0.f; }, slab);
    multiply<Along::kDepth, Along::kDepth>(
        qw, kTile, [&](int i, int p) { return i < count ? -da[i * kTile + p] : 0.f; },
        [&](int p, int j) { return j < count ? x[j * kTile + p] : 0.f; }, slab);
    qw.for_each([&](int i, int j, float& value) { square[i * kScoreRow + j] = j <= i ? value : 0.f; });
    wide.clear();
    multiply<Along::kDepth, Along::kOther>(wide, kTile, from_square, w, slab);
    multiply<Along::kDepth, Along::kOther>(
        wide, count, [&](int i, int p) { return i < count ? da[i * kTile + p] : 0.f; }, k, slab);
    wide.for_each([&](int i, int j, float& value) {
      if (i < count && j < call.K) call.dq.set(unit.b, first + i, unit.h, j, value + dq[i * D + j]);
    });
    wide.clear();
    multiply<Along::kOther, Along::kOther>(wide, count, from_square_transposed, q, slab);
    add_dw(wide, false);
    wide.clear();
    multiply<Along::kOther, Along::kOther>(
        wide, count, [&](int i, int p) { return da[p * kTile + i]; }, q, slab);
    add_rows<D>(wide, dk, count);
  }

  // R_W = Y^T dU,   R_X = Y^T dX,   dN = -tril(R_W U^T + R_X X^T, -1)
  const auto y_transposed = [&](int i, int p) { return y[p * (kTile + 1) + i]; };
  __syncthreads();
  dx.for_each([&](int i, int j, float& value) { square[i * kScoreRow + j] = value; });
  Block<64> block;
  block.clear();
  multiply<Along::kOther, Along::kOther>(
      block, kTile, y_transposed, [&](int p, int j) { return square[p * kScoreRow + j]; }, slab);
  block.for_each([&](int i, int j, float& value) { rx[i * kScoreRow + j] = value; });
  wide.clear();
  multiply<Along::kOther, Along::kOther>(
      wide, count, y_transposed, [&](int p, int j) { return du[p * D + j]; }, slab);
  wide.for_each([&](int i, int j, float& value) {
    if (i < count) rw[i * D + j] = value;
  });
  Block<64> dn;
  dn.clear();
  multiply<Along::kDepth, Along::kDepth>(
      dn, D, [&](int i, int p) { return i < count ? -rw[i * D + p] : 0.f; }, [&](int p, int j) { return j < count ? u[j * D + p] : 0.f; }, slab);
  multiply<Along::kDepth, Along::kDepth>(
      dn, kTile, [&](int i, int p) { return -rx[i * kScoreRow + p]; }, [&](int p, int j) { return j < count ? x[j * kTile + p] : 0.f; }, slab);
  dn.for_each([&](int i, int j, float& value) {
    if (j >= i) value = 0;
  });

  // dbeta = rowsum(R_W W + R_X tril(W K^T, -1) + dN W W^T)
  Block<64> wk, ww;
  wk.clear();
  multiply<Along::kDepth, Along::kDepth>(
      wk, call.K, w, [&](int p, int j) { return k(j, p); }, slab);
  ww.clear();
  multiply<Along::kDepth, Along::kDepth>(
      ww, call.K, w, [&](int p, int j) { return w(j, p); }, slab);
  float sums[4] = {};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = 4 * (threadIdx.x / 16) + r;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int j = 4 * (threadIdx.x % 16) + c;
      if (j < i) sums[r] += rx[i * kScoreRow + j] * wk.x[0][r][c] + dn.x[0][r][c] * ww.x[0][r][c];
    }
    for (int c = threadIdx.x % 16; c < call.K; c += 16)
      if (i < count) sums[r] += rw[i * D + c] * w(i, c);
    sums[r] = row_sum(sums[r]);
    if (threadIdx.x % 16 == 0 && i < count) call.dbeta.set(keys.b, first + i, keys.h, 0, sums[r]);
  }

  // dW += B R_W + tril(B R_X, -1) K + (E + E^T) W,   dK += tril(B R_X, -1)^T W,   E = B dN
  __syncthreads();
  dn.for_each([&](int i, int j, float& value) { n[i * (kTile + 1) + j] = beta[i] * value; });
  block.for_each([&](int i, int j, float& value) { square[i * kScoreRow + j] = j < i ? beta[i] * value : 0.f; });
  wide.clear();
  multiply<Along::kDepth, Along::kOther>(wide, kTile, from_square, k, slab);
  multiply<Along::kDepth, Along::kOther>(
      wide, kTile, [&](int i, int p) { return n[i * (kTile + 1) + p] + n[p * (kTile + 1) + i]; }, w, slab);
  wide.for_each([&](int i, int j, float& value) {
    if (i < count) value += beta[i] * rw[i * D + j];
  });
  add_dw(wide, false);
  wide.clear();
  multiply<Along::kOther, Along::kOther>(wide, kTile, from_square_transposed, w, slab);
  wide.for_each([&](int i, int j, float& value) {
    if (i < count && j < call.K) call.dk.set(keys.b, first + i, keys.h, j, value + dk[i * D + j]);
  });
  for (int e = threadIdx.x; e < count * call.V; e += kThreads)
    call.dv.set(keys.b, first + e / call.V, keys.h, e % call.V, call.at.dv[row + e / call.V * D + e % call.V]);
}

}  // namespace pathattn::cuda
