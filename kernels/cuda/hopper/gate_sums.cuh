// Sums of a forget gate's logarithm, base 2 and with the gate's factor, so that a score's part is short sums and one difference in float64
// (layout.cuh).
#pragma once

#include "kernels/cuda/gates.cuh"
#include "kernels/cuda/hopper/call.cuh"

namespace pathattn::cuda::hopper {

// A CTA of one thread a token, a tile and query head: gate_prefix and gate_suffix; gate_before[tile + 1] becomes the tile's sum.
__global__ void sum_gates_of_tiles(const __grid_constant__ Call call) {
  __shared__ double sums[kTile];
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  const Unit head = query_unit(call, blockIdx.y);
  const int r = threadIdx.x;
  const double factor = static_cast<double>(kLog2E) * call.gate_factor;
  sums[r] = r < tile.count ? factor * fmax(static_cast<double>(call.g.at(head.b, tile.first() + r, head.h)), kCut) : 0;
  __syncthreads();
  for (int step = 1; step < kTile; step *= 2) {
    const double earlier = r >= step ? sums[r - step] : 0;
    __syncthreads();
    sums[r] += earlier;
    __syncthreads();
  }
  const int64_t at = slot(call, blockIdx.y, blockIdx.x) * kTile + r;
  const float high = static_cast<float>(sums[r]);
  call.at.gate_prefix[at] = {high, static_cast<float>(sums[r] - high)};
  call.at.gate_suffix[at] = static_cast<float>(sums[kTile - 1] - sums[r]);
  if (r == 0) call.at.gate_before[blockIdx.y * (call.max_tiles + 1) + blockIdx.x + 1] = sums[kTile - 1];
}

// A warp an array [max_tiles + 1] of sums[1 ...] of the tiles, which become running sums over all tiles; what came before a document cancels in
// differences.
__global__ void sum_over_tiles(double* sums, const int* num_tiles, int64_t max_tiles) {
  double* through = sums + blockIdx.x * (max_tiles + 1);
  double carried = 0;
  if (threadIdx.x == 0) through[0] = 0;
  for (int first = 1; first <= *num_tiles; first += 32) {
    const int i = first + threadIdx.x;
    double sum = i <= *num_tiles ? through[i] : 0;
    for (int step = 1; step < 32; step *= 2) {
      const double earlier = __shfl_up_sync(0xffffffffu, sum, step);
      if (threadIdx.x >= step) sum += earlier;
    }
    sum += carried;
    if (i <= *num_tiles) through[i] = sum;
    carried = __shfl_sync(0xffffffffu, sum, 31);
  }
}

}  // namespace pathattn::cuda::hopper
