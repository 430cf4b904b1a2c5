// The gradient of the gate, backward's last stage.
#pragma once

#include "kernels/cuda/hopper/call.cuh"

namespace pathattn::cuda::hopper {

// Sums of scores' gradients over a token's row less over its column; a token's gate gains those of its document's tokens from it on.
struct GateGradient {
  Tensor dg;
  const float *row_sums, *column_sums;  // [query unit][max_tiles][kTile] with other tiles
  const float* own_sums;                // [query unit][max_tiles][kTile] row less column inside the tile
  double* through;                      // [query unit][max_tiles + 1] sums over all tiles before
};

// A tile's sum of `value` and of those of later threads of the CTA, one a token.
__device__ inline double sum_from_here(double value) {
  __shared__ double sums[2][kTile];
  sums[0][threadIdx.x] = value;
  int now = 0;
  for (int step = 1; step < kTile; step *= 2) {
    __syncthreads();
    const double later = threadIdx.x + step < kTile ? sums[now][threadIdx.x + step] : 0;
    sums[now ^ 1][threadIdx.x] = sums[now][threadIdx.x] + later;
    now ^= 1;
  }
  return sums[now][threadIdx.x];
}
__device__ inline double gate_sum(const Call& call, const GateGradient& at, const Tile& tile) {
  const int64_t i = slot(call, blockIdx.y, blockIdx.x) * kTile + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= tile.count) return 0;
  double sum = at.own_sums[i];
  if (tile.index > 0) sum += at.row_sums[i];
  if (tile.index + 1 < tile.num_tiles) sum -= at.column_sums[i];
  return sum;
}

// One thread a token, a CTA a tile and query head: the tile's sum, into through[tile + 1].
__global__ void __launch_bounds__(kTile) sum_gate_gradients(const __grid_constant__ Call call, const __grid_constant__ GateGradient at) {
  if (blockIdx.x >= *call.at.num_tiles) return;
  const double sum = sum_from_here(gate_sum(call, at, call.at.tiles[blockIdx.x]));
  if (threadIdx.x == 0) at.through[blockIdx.y * (call.max_tiles + 1) + blockIdx.x + 1] = sum;
}

// The same grid, after `through` has become running sums over tiles.
__global__ void __launch_bounds__(kTile) write_gate_gradients(const __grid_constant__ Call call, const __grid_constant__ GateGradient at) {
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  const Unit head = query_unit(call, blockIdx.y);
  const double* through = at.through + blockIdx.y * (call.max_tiles + 1) + blockIdx.x;
  const double sum = sum_from_here(gate_sum(call, at, tile)) + (through[tile.num_tiles - tile.index] - through[1]);
  const int r = threadIdx.x;
  // A document's first gate acts on no score.
  if (r < tile.count) at.dg.set(head.b, tile.first() + r, head.h, 0, tile.index == 0 && r == 0 ? 0.f : static_cast<float>(sum * call.gate_factor));
}

}  // namespace pathattn::cuda::hopper
