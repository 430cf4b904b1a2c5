// Kernels that go over rows of tokens: sums of gates and their gradient, delta.
#pragma once

#include "kernels/cuda/call.cuh"
#include "kernels/cuda/gates.cuh"

namespace pathattn::cuda {

// One warp a document and query unit: running sum of g in float64.
__global__ void sum_gates(Call call) {
  const Unit unit = query_unit(call, blockIdx.y);
  for (int id = blockIdx.x; id < *call.at.num_tiles; id += gridDim.x) {
    const Tile tile = call.at.tiles[id];
    if (tile.index != 0) continue;
    double before = 0;
    for (int i = 0; i < tile.num_tiles; ++i) {
      const Tile part = call.at.tiles[id + i];
      for (int r0 = 0; r0 < part.count; r0 += 32) {
        const int r = r0 + threadIdx.x;
        double sum = r < part.count ? fmax(static_cast<double>(call.g.at(unit.b, part.first() + r, unit.h)), kCut) : 0;
        for (int step = 1; step < 32; step *= 2) {
          const double earlier = __shfl_up_sync(0xffffffffu, sum, step);
          if (threadIdx.x >= step) sum += earlier;
        }
        sum += before;
        if (r < part.count) {
          const float high = static_cast<float>(sum);
          call.at.gate_sums[unit.local * call.T + part.first() + r] = {high, static_cast<float>(sum - high)};
        }
        before = __shfl_sync(0xffffffffu, sum, 31);
      }
    }
  }
}

// One CTA a document's query unit, backwards: dg_t = factor * sum over i >= t of (row sum - column sum).
__global__ void gate_gradient(Call call) {
  const Unit unit = query_unit(call, blockIdx.y);
  for (int id = blockIdx.x; id < *call.at.num_tiles; id += gridDim.x) {
    const Tile tile = call.at.tiles[id];
    if (tile.index != 0) continue;
    double after = 0;
    for (int i = tile.num_tiles - 1; i >= 0; --i) {
      const Tile part = call.at.tiles[id + i];
      for (int r0 = (part.count - 1) / 32 * 32; r0 >= 0; r0 -= 32) {
        const int r = r0 + 31 - threadIdx.x;  // lane 0 has the last row
        const int64_t at = unit.local * call.T + part.first() + r;
        double sum = r < part.count ? static_cast<double>(call.at.row_sums[at]) - call.at.column_sums[at] : 0;
        for (int step = 1; step < 32; step *= 2) {
          const double later = __shfl_up_sync(0xffffffffu, sum, step);
          if (threadIdx.x >= step) sum += later;
        }
        sum += after;
        // A document's first gate acts on no score.
        if (r < part.count) call.dg.set(unit.b, part.first() + r, unit.h, 0, i == 0 && r == 0 ? 0.f : static_cast<float>(sum * call.gate_factor));
        after = __shfl_sync(0xffffffffu, sum, 31);
      }
    }
  }
}

// delta_i = sum of d_o * o over a row, less d_lse: a warp a row.
__global__ void sum_output_gradients(Call call) {
  const Unit unit = query_unit(call, blockIdx.y);
  const int64_t t = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (t >= call.T) return;
  float sum = 0;
  for (int c = threadIdx.x % 32; c < call.V; c += 32) sum = fmaf(call.d_out.at(unit.b, t, unit.h, c), call.out.at(unit.b, t, unit.h, c), sum);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) call.at.delta[unit.local * call.T + t] = sum - (call.d_lse.data ? call.d_lse.at(unit.b, t, unit.h) : 0.f);
}

}  // namespace pathattn::cuda
