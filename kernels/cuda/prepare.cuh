// Stages before attention: the UT transform of each tile and the carrying of keys to their chunk's end (docs/mathematics.md).
#pragma once

#include "kernels/cuda/call.cuh"

namespace pathattn::cuda {

// Y = (I + N)^-1 for a strictly lower triangular N, both [kTile][kTile + 1] in shared memory: four threads a column.
__device__ inline void invert(const float* n, float* y) {
  const int column = threadIdx.x / 4, part = threadIdx.x % 4;
  __syncthreads();
  for (int i = 0; i < kTile; ++i) {
    float sum = 0;
    for (int j = column + part; j < i; j += 4) sum += n[i * (kTile + 1) + j] * y[j * (kTile + 1) + column];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (part == 0) y[i * (kTile + 1) + column] = (i == column ? 1.f : 0.f) - sum;
    __syncwarp();
  }
  __syncthreads();
}

// A tile's rows of an input, zero beyond its tokens and width.
struct TileRows {
  const Tensor& tensor;
  int64_t b, first;
  int h, count, width;
  __device__ float operator()(int row, int column) const { return row < count && column < width ? tensor.at(b, first + row, h, column) : 0.f; }
};
__device__ inline TileRows rows_of(const Tensor& tensor, const Unit& unit, const Tile& tile, int width) {
  return {tensor, unit.b, tile.first(), unit.h, tile.count, width};
}

inline constexpr int kSquare = kTile * (kTile + 1);  // floats of a [kTile][kTile + 1] array in shared memory

// N, then Y of a tile: y and n are kSquare floats. n keeps beta_i w_i w_j below the diagonal.
template <int D>
__device__ void tile_inverse(const Call& call, const TileRows& w, const float* beta, float* n, float* y, float* slab) {
  Block<64> ww;
  ww.clear();
  multiply<Along::kDepth, Along::kDepth>(
      ww, call.K, w, [&](int p, int j) { return w(j, p); }, slab);
  ww.for_each([&](int i, int j, float& x) { n[i * (kTile + 1) + j] = j < i ? beta[i] * x : 0.f; });
  invert(n, y);
}

// u, x, tile_keys and tile_g of one tile.
template <int D>
__global__ void __launch_bounds__(kThreads, 1) prepare_tiles(Call call) {
  extern __shared__ float shared[];
  float *slab = shared, *n = slab + kSlabFloats<D>, *y = n + kSquare, *beta = y + kSquare;
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  const Unit unit = key_unit(call, blockIdx.y);
  const TileRows w = rows_of(call.w, unit, tile, call.K), k = rows_of(call.k, unit, tile, call.K);
  const int64_t row = row_of<D>(call, unit, tile.first());
  if (threadIdx.x < kTile) beta[threadIdx.x] = threadIdx.x < tile.count ? call.beta.at(unit.b, tile.first() + threadIdx.x, unit.h) : 0.f;
  tile_inverse<D>(call, w, beta, n, y, slab);

  const auto t = [&](int i, int p) { return y[i * (kTile + 1) + p] * beta[p]; };
  Block<D> wide;
  wide.clear();
  multiply<Along::kDepth, Along::kOther>(wide, kTile, t, w, slab);
  wide.for_each([&](int i, int j, float& value) {
    if (i < tile.count) call.at.u[row + int64_t{i} * D + j] = value;
  });

  Block<64> square;
  square.clear();
  multiply<Along::kDepth, Along::kDepth>(
      square, call.K, w, [&](int p, int j) { return k(j, p); }, slab);
  square.for_each([&](int i, int j, float& value) { n[i * (kTile + 1) + j] = j < i ? value : 0.f; });
  square.clear();
  multiply<Along::kDepth, Along::kOther>(
      square, kTile, t, [&](int p, int j) { return n[p * (kTile + 1) + j]; }, slab);
  square.for_each([&](int i, int j, float& value) {
    n[i * (kTile + 1) + j] = value;
    if (i < tile.count) call.at.x[(unit.local * call.T + tile.first() + i) * kTile + j] = value;
  });

  wide.clear();
  multiply<Along::kOther, Along::kOther>(
      wide, kTile, [&](int i, int p) { return n[p * (kTile + 1) + i]; }, w, slab);
  wide.for_each([&](int i, int j, float& value) {
    if (i < tile.count) call.at.tile_keys[row + int64_t{i} * D + j] = k(i, j) - value;
  });

  if (tile.index + 1 == tile.num_tiles) return;  // nothing comes after that would be carried through
  const float* u = call.at.u + row;
  float* matrix = call.at.tile_g + tile_matrix<D>(call, unit.local, tile.first());
  for (int r = 0; r < D; r += kTile) {
    wide.clear();
    multiply<Along::kOther, Along::kOther>(
        wide, kTile, [&](int i, int p) { return w(p, r + i); }, [&](int p, int j) { return u[p * D + j]; }, slab);
    wide.for_each([&](int i, int j, float& value) { matrix[(r + i) * D + j] = (r + i == j ? 1.f : 0.f) - value; });
  }
}

// out = a b for [D, D] matrices in global memory, 64 rows at a time; out may be a.
template <int D>
__device__ void multiply_matrices(const float* a, const float* b, float* out, float* slab) {
  for (int r = 0; r < D; r += kTile) {
    Block<D> rows;
    rows.clear();
    multiply<Along::kDepth, Along::kOther>(
        rows, D, [&](int i, int p) { return a[(r + i) * D + p]; }, [&](int p, int j) { return b[p * D + j]; }, slab);
    rows.for_each([&](int i, int j, float& value) { out[(r + i) * D + j] = value; });
  }
  __syncthreads();
}

// suffix, chunk_keys and chunk_g of a chunk that is not its document's last; one CTA a chunk (at its first tile).
template <int D>
__global__ void __launch_bounds__(kThreads, 1) carry_keys(Call call) {
  extern __shared__ float slab[];
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  if (tile.index % kChunkTiles != 0 || tile.chunk() + 1 == tile.num_chunks()) return;
  const Unit unit = key_unit(call, blockIdx.y);
  const auto matrix = [&](float* base, int t) { return base + tile_matrix<D>(call, unit.local, tile.first() + t * kTile); };
  float* suffix = matrix(call.at.suffix, kChunkTiles - 1);
  for (int e = threadIdx.x; e < D * D; e += kThreads) suffix[e] = e / D == e % D;
  __syncthreads();
  for (int t = kChunkTiles - 1; t >= 0; --t) {
    const int64_t row = row_of<D>(call, unit, tile.first() + t * kTile);
    const float* keys = call.at.tile_keys + row;
    Block<D> carried;
    carried.clear();
    multiply<Along::kDepth, Along::kDepth>(
        carried, D, [&](int i, int p) { return keys[i * D + p]; }, [&](int p, int j) { return suffix[j * D + p]; }, slab);
    carried.for_each([&](int i, int j, float& value) { call.at.chunk_keys[row + i * D + j] = value; });
    float* next = t > 0 ? matrix(call.at.suffix, t - 1) : call.at.chunk_g + chunk_matrix<D>(call, unit.local, tile.first());
    multiply_matrices<D>(suffix, matrix(call.at.tile_g, t), next, slab);
    suffix = next;
  }
}

}  // namespace pathattn::cuda
