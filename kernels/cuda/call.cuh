// What every kernel of a call is given: the problem's tensors, the tiles of a batch row, and the workspace of the heads at work.
#pragma once

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/tensor.cuh"

namespace pathattn::cuda {

inline constexpr int kChunkTiles = 8;  // tiles of a chunk
inline constexpr int kChunk = kChunkTiles * kTile;

// 64 tokens of one document, the last tile of a document perhaps fewer.
struct Tile {
  int64_t document;      // its document's first token
  int index, num_tiles;  // which tile of its document's how many
  int count;             // tokens
  __device__ int64_t first() const { return document + int64_t{index} * kTile; }
  __device__ int chunk() const { return index / kChunkTiles; }
  __device__ int num_chunks() const { return (num_tiles + kChunkTiles - 1) / kChunkTiles; }
};

// A float64 number as two floats: differences of long sums keep float32's accuracy.
__device__ inline float difference(float2 a, float2 b) { return (a.x - b.x) + (a.y - b.y); }

// Arrays of the workspace. A unit is a key head of a batch row, a query unit one of its query heads. Rows are D wide, padded with zeros.
// Matrices [D, D] of a whole tile or chunk are found by its first token: no two share first / kTile (first / kChunk).
struct Workspace {
  Tile* tiles;        // [max_tiles]
  int* num_tiles;     // [1]
  float2* gate_sums;  // [query unit][T] sum of g from the document's first token to the token
  float* u;           // [unit][T][D] T W of the tile
  float* x;           // [unit][T][kTile] T tril(W K^T, -1)
  float* tile_keys;   // [unit][T][D] keys carried to their tile's end
  float* chunk_keys;  // [unit][T][D] to their chunk's end
  float* tile_g;      // [unit][T / kTile][D][D] product of the tile's H
  float* suffix;      // [unit][T / kTile][D][D] product of the chunk's later tiles' tile_g
  float* chunk_g;     // [unit][T / kChunk][D][D]
  // Backward only:
  float* out;          // [query unit][T][V] of 16-bit inputs: o before it was rounded, and
  float* lse;          // [query unit][T]
  float* delta;        // [query unit][T]
  float* row_sums;     // [query unit][T] of dS: rows, then columns
  float* column_sums;  // [query unit][T]
  float* q_chunk;      // [query unit][T][D] queries carried to their chunk's start
  float* dq;           // [query unit][T][D] gradient of q_chunk, then of the queries carried to their tile's start
  float* da;           // [query unit][T][kTile] gradient of the scores inside a tile
  float* dk;           // [unit][T][D] gradient of chunk_keys, then of tile_keys
  float* dv;           // [unit][T][D]
  float* dtile_g;      // [unit][T / kTile][D][D]
  float* dchunk_g;     // [unit][slots][T / kChunk][D][D]
  float* chain;        // [unit][slots][T / kChunk + 1][kTile][D] a CTA's keys or queries carried from chunk to chunk
  float* du;           // [unit][T][D]
  float* rw;           // [unit][T][D]
};

struct Call {
  Tensor q, k, v, w, beta, g, out, out_rest, lse, d_out, d_lse, dq, dk, dv, dw, dbeta, dg;
  int64_t T;
  int heads, group, K, V;  // key heads, query heads a key head
  int64_t first_unit;      // of the units at work; grids count from 0
  float scale, gate_factor;
  int slots;
  Workspace at;
};

// The unit or query unit of a CTA.
struct Unit {
  int64_t local, b;  // local: among the units at work
  int h;
  __device__ Unit(const Call& call, int64_t local, int heads, int64_t first) : local(local), b((first + local) / heads), h((first + local) % heads) {}
};
__device__ inline Unit key_unit(const Call& call, int64_t local) { return Unit(call, local, call.heads, call.first_unit); }
__device__ inline Unit query_unit(const Call& call, int64_t local) {
  return Unit(call, local, call.heads * call.group, call.first_unit * call.group);
}

template <int D>
__device__ int64_t row_of(const Call& call, const Unit& unit, int64_t token) {
  return (unit.local * call.T + token) * D;
}
template <int D>
__device__ int64_t tile_matrix(const Call& call, int64_t unit, int64_t token) {
  return (unit * (call.T / kTile) + token / kTile) * D * D;
}
template <int D>
__device__ int64_t chunk_matrix(const Call& call, int64_t unit, int64_t token) {
  return (unit * (call.T / kChunk) + token / kChunk) * D * D;
}

// The gate's part of score (i, j), query i, key j.
__device__ inline float decay(const Call& call, const float2* sums, int64_t i, int64_t j) { return call.gate_factor * difference(sums[i], sums[j]); }

}  // namespace pathattn::cuda
