// Stick-breaking attention of 64-row tiles (kernels/stick_breaking.h has the equations). Sixteen threads share a row; products over its keys are
// scans among them.
//
// Backward goes over kSpan tiles of queries at a time. Each first walks from its newest tile of keys to its oldest and notes what is left before each
// (`rests`), then back, and notes the sum over older keys (`older`); with both, each tile of keys gathers its gradients from these queries alone.
#pragma once

#include "kernels/cuda/attention.cuh"

namespace pathattn::cuda {

inline constexpr int kSpan = 32;  // tiles of queries whose notes are kept at a time

struct StickBreakingCall {
  Call call;  // its tensors but w, beta, g and lse, its tiles, and of its workspace dk and dv
  Tensor rest, d_rest;
  float *rests, *older;  // [query unit at work][kSpan][tiles a document may have][kTile]
  int first_tile;        // of the span

  __device__ int64_t note(int64_t query_unit, int query_tile, int key_tile) const {
    return ((query_unit * kSpan + query_tile - first_tile) * (call.T / kTile + 1) + key_tile) * kTile;
  }
};

// A thread's four rows and four columns of a pair of tiles.
struct Rows {
  const Tile &queries, &keys;
  __device__ int row(int r) const { return 4 * (threadIdx.x / 16) + r; }
  __device__ int column(int c) const { return 4 * (threadIdx.x % 16) + c; }
  __device__ bool pair(int r, int c) const {
    return row(r) < queries.count && column(c) < keys.count && (queries.index != keys.index || column(c) < row(r));
  }
};

// What one key, or some keys one after another, take of a stick and what they leave of it: both, since either may be too close to 1 to tell the
// other.
struct Share {
  float taken = 0, kept = 1;
  Share() = default;
  __device__ Share(float taken, float kept) : taken(taken), kept(kept) {}
  __device__ explicit Share(float z) {
    const float e = expf(-fabsf(z)), larger = 1.f / (1.f + e), smaller = e * larger;
    taken = z >= 0 ? larger : smaller;
    kept = z >= 0 ? smaller : larger;
  }
  __device__ Share then(const Share& older) const { return {taken + kept * older.taken, kept * older.kept}; }
  __device__ float left() const { return taken < 0.5f ? 1.f - taken : kept; }  // one rounding, not one a key
};

// One share a thread: those of the threads to its right in a row together, and those of the whole row.
struct RowShare {
  Share right, all;
  __device__ explicit RowShare(Share x) {
    const int lane = threadIdx.x % 16;
    const auto from_right = [](const Share& y, int step) {
      return Share(__shfl_down_sync(0xffffffffu, y.taken, step, 16), __shfl_down_sync(0xffffffffu, y.kept, step, 16));
    };
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      const Share other = from_right(x, step);
      if (lane + step < 16) x = other.then(x);
    }
    right = from_right(x, 1);
    if (lane == 15) right = Share();
    all = Share(__shfl_sync(0xffffffffu, x.taken, 0, 16), __shfl_sync(0xffffffffu, x.kept, 0, 16));
  }
};

// One number a thread: the sum over the threads to its left in a row, and over the whole row.
struct RowSum {
  float left, all;
  __device__ explicit RowSum(float x) {
    const int lane = threadIdx.x % 16;
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, x, step, 16);
      if (lane >= step) x += other;
    }
    left = __shfl_up_sync(0xffffffffu, x, 1, 16);
    if (lane == 0) left = 0;
    all = __shfl_sync(0xffffffffu, x, 15, 16);
  }
};

// z of a pair of tiles.
template <int D>
__device__ void logits(const Call& call, const Unit& unit, const Unit& keys, const Tile& query_tile, const Tile& key_tile, Block<64>& z,
                       float* slab) {
  const TileRows q = rows_of(call.q, unit, query_tile, call.K), k = rows_of(call.k, keys, key_tile, call.K);
  z.clear();
  multiply<Along::kDepth, Along::kDepth>(
      z, call.K, q, [&](int p, int j) { return k(j, p); }, slab);
  z.for_each([&](int, int, float& x) { x *= call.scale; });
}

// Breaks the tile's shares off what is left of each row's stick: rest goes on, weights become A (0 where a query does not see a key).
__device__ inline void break_sticks(const Rows& rows, const Block<64>& z, float (&rest)[4], Block<64>& weights) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    Share newer;  // of this thread
#pragma unroll
    for (int c = 3; c >= 0; --c) {
      const Share share = rows.pair(r, c) ? Share(z.x[0][r][c]) : Share();
      weights.x[0][r][c] = share.taken * newer.left();
      newer = newer.then(share);
    }
    const RowShare shares(newer);
#pragma unroll
    for (int c = 0; c < 4; ++c) weights.x[0][r][c] *= rest[r] * shares.right.left();
    rest[r] *= shares.all.left();
  }
}

// z becomes its gradient, from the weights and their gradients; older goes on from the sum of A dA over older tiles.
__device__ inline void differentiate(const Rows& rows, Block<64>& z, const Block<64>& weights, const Block<64>& d_weights, float (&older)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float product[4], own = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      product[c] = rows.pair(r, c) ? weights.x[0][r][c] * d_weights.x[0][r][c] : 0.f;
      own += product[c];
    }
    const RowSum sum(own);
    float before = older[r] + sum.left;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const Share share(z.x[0][r][c]);
      z.x[0][r][c] = rows.pair(r, c) ? share.kept * product[c] - share.taken * before : 0.f;
      before += product[c];
    }
    older[r] += sum.all;
  }
}

__device__ inline void store_square(const Block<64>& block, float* square) {
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) square[(4 * (threadIdx.x / 16) + r) * kScoreRow + 4 * (threadIdx.x % 16) + c] = block.x[0][r][c];
}

// One thread of each row writes its number; every thread of a row reads it.
__device__ inline void write_rows(const float (&from)[4], float* to) {
  if (threadIdx.x % 16 != 0) return;
  for (int r = 0; r < 4; ++r) to[4 * (threadIdx.x / 16) + r] = from[r];
}
__device__ inline void read_rows(const float* from, float (&to)[4]) {
  for (int r = 0; r < 4; ++r) to[r] = from[4 * (threadIdx.x / 16) + r];
}

// o and rest of one tile of queries.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) stick_breaking_attend(StickBreakingCall stick) {
  extern __shared__ float shared[];
  float *slab = shared, *square = slab + kSlabFloats<D>;
  const Call& call = stick.call;
  const int id = *call.at.num_tiles - 1 - static_cast<int>(blockIdx.x);  // long rows first
  if (id < 0) return;
  const Tile tile = call.at.tiles[id];
  const Unit unit = query_unit(call, blockIdx.y), keys = key_unit(call, blockIdx.y / call.group);
  Block<64> z, weights;
  Block<D> out;
  out.clear();
  float rest[4] = {1, 1, 1, 1};
  for (int t = tile.index; t >= 0; --t) {
    const Tile other = sibling(tile, t);
    logits<D>(call, unit, keys, tile, other, z, slab);
    break_sticks({tile, other}, z, rest, weights);
    store_square(weights, square);
    multiply<Along::kDepth, Along::kOther>(
        out, other.count, [&](int i, int p) { return square[i * kScoreRow + p]; }, rows_of(call.v, keys, other, call.V), slab);
  }
  out.for_each([&](int i, int j, float& o) {
    if (i < tile.count && j < call.V) call.out.set(unit.b, tile.first() + i, unit.h, j, o);
  });
  if (threadIdx.x % 16 == 0) {
    for (int r = 0; r < 4; ++r) {
      const int i = 4 * (threadIdx.x / 16) + r;
      if (i < tile.count) stick.rest.set(unit.b, tile.first() + i, unit.h, 0, rest[r]);
    }
  }
}

// dA = dO V^T of a pair of tiles.
template <int D>
__device__ void weight_gradients(const Call& call, const TileRows& d_out, const TileRows& values, Block<64>& d_weights, float* slab) {
  d_weights.clear();
  multiply<Along::kDepth, Along::kDepth>(
      d_weights, call.V, d_out, [&](int p, int j) { return values(j, p); }, slab);
}

// rests, older and dq of one of the span's tiles of queries.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) stick_breaking_queries(StickBreakingCall stick) {
  extern __shared__ float shared[];
  float *slab = shared, *square = slab + kSlabFloats<D>;
  const Call& call = stick.call;
  const int id = stick.first_tile + static_cast<int>(blockIdx.x);
  if (id >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[id];
  const Unit unit = query_unit(call, blockIdx.y), keys = key_unit(call, blockIdx.y / call.group);
  Block<64> z, weights;
  float rest[4] = {1, 1, 1, 1};
  for (int t = tile.index; t >= 0; --t) {
    const Tile other = sibling(tile, t);
    logits<D>(call, unit, keys, tile, other, z, slab);
    write_rows(rest, stick.rests + stick.note(unit.local, id, t));
    break_sticks({tile, other}, z, rest, weights);
  }
  float older[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = 4 * (threadIdx.x / 16) + r;
    older[r] = stick.d_rest.data && i < tile.count ? rest[r] * stick.d_rest.at(unit.b, tile.first() + i, unit.h) : 0.f;
  }
  const TileRows d_out = rows_of(call.d_out, unit, tile, call.V);
  Block<64> d_weights;
  Block<D> dq;
  dq.clear();
  for (int t = 0; t <= tile.index; ++t) {
    const Tile other = sibling(tile, t);
    logits<D>(call, unit, keys, tile, other, z, slab);  // its barriers show every thread the notes
    read_rows(stick.rests + stick.note(unit.local, id, t), rest);
    write_rows(older, stick.older + stick.note(unit.local, id, t));
    break_sticks({tile, other}, z, rest, weights);
    weight_gradients<D>(call, d_out, rows_of(call.v, keys, other, call.V), d_weights, slab);
    differentiate({tile, other}, z, weights, d_weights, older);
    store_square(z, square);
    multiply<Along::kDepth, Along::kOther>(
        dq, other.count, [&](int i, int p) { return call.scale * square[i * kScoreRow + p]; }, rows_of(call.k, keys, other, call.K), slab);
  }
  dq.for_each([&](int i, int j, float& x) {
    if (i < tile.count && j < call.K) call.dq.set(unit.b, tile.first() + i, unit.h, j, x);
  });
}

// What the span's queries add to dk and dv of one tile of keys, number first_key_tile + blockIdx.x. Between spans the sums wait in the workspace.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) stick_breaking_keys(StickBreakingCall stick, int first_key_tile) {
  extern __shared__ float shared[];
  float *slab = shared, *square = slab + kSlabFloats<D>;
  const Call& call = stick.call;
  const int id = first_key_tile + static_cast<int>(blockIdx.x);
  if (id >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[id];
  const int newest = min(id + tile.num_tiles - 1 - tile.index, *call.at.num_tiles - 1);  // of the document
  const int first = max(id, stick.first_tile), last = min(newest, stick.first_tile + kSpan - 1);
  if (first > last) return;
  const Unit keys = key_unit(call, blockIdx.y);
  const TileRows values = rows_of(call.v, keys, tile, call.V);
  float* const dk_rows = call.at.dk + row_of<D>(call, keys, tile.first());
  float* const dv_rows = call.at.dv + row_of<D>(call, keys, tile.first());
  Block<64> z, weights, d_weights;
  Block<D> dk, dv;
  dk.clear();
  dv.clear();
  if (id < stick.first_tile) {
    dk.for_each([&](int i, int j, float& x) { x = i < tile.count ? dk_rows[i * D + j] : 0.f; });
    dv.for_each([&](int i, int j, float& x) { x = i < tile.count ? dv_rows[i * D + j] : 0.f; });
  }
  for (int query_id = first; query_id <= last; ++query_id) {
    const Tile query_tile = call.at.tiles[query_id];
    for (int member = 0; member < call.group; ++member) {
      const Unit unit = query_unit(call, keys.local * call.group + member);
      const TileRows q = rows_of(call.q, unit, query_tile, call.K), d_out = rows_of(call.d_out, unit, query_tile, call.V);
      float rest[4], older[4];
      read_rows(stick.rests + stick.note(unit.local, query_id, tile.index), rest);
      read_rows(stick.older + stick.note(unit.local, query_id, tile.index), older);
      logits<D>(call, unit, keys, query_tile, tile, z, slab);
      break_sticks({query_tile, tile}, z, rest, weights);
      weight_gradients<D>(call, d_out, values, d_weights, slab);
      store_square(weights, square);
      multiply<Along::kOther, Along::kOther>(
          dv, query_tile.count, [&](int i, int p) { return square[p * kScoreRow + i]; }, d_out, slab);
      differentiate({query_tile, tile}, z, weights, d_weights, older);
      store_square(z, square);
      multiply<Along::kOther, Along::kOther>(
          dk, query_tile.count, [&](int i, int p) { return call.scale * square[p * kScoreRow + i]; }, q, slab);
    }
  }
  const bool done = last == newest;
  dk.for_each([&](int i, int j, float& x) {
    if (i >= tile.count) return;
    if (!done) {
      dk_rows[i * D + j] = x;
    } else if (j < call.K) {
      call.dk.set(keys.b, tile.first() + i, keys.h, j, x);
    }
  });
  dv.for_each([&](int i, int j, float& x) {
    if (i >= tile.count) return;
    if (!done) {
      dv_rows[i * D + j] = x;
    } else if (j < call.V) {
      call.dv.set(keys.b, tile.first() + i, keys.h, j, x);
    }
  });
}

}  // namespace pathattn::cuda
