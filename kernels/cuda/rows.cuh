// Kernels that go over rows of tokens: the tiles of the documents, sums of gates and their gradient, delta.
#pragma once

#include "kernels/cuda/call.cuh"

namespace pathattn::cuda {

// One CTA lists the tiles of a batch row, documents in order. cu_seqlens null: one document of T tokens.
__global__ void list_tiles(const int64_t* cu_seqlens, int64_t num_documents, int64_t T, int64_t max_tiles, Tile* tiles, int* num_tiles) {
  __shared__ int64_t ends[kThreads];
  __shared__ int64_t before;
  if (threadIdx.x == 0) before = 0;
  for (int64_t d0 = 0; d0 < num_documents; d0 += kThreads) {
    const int64_t d = d0 + threadIdx.x;
    int64_t first = 0, last = 0;
    if (d < num_documents) {
      first = cu_seqlens ? min(max(cu_seqlens[d], int64_t{0}), T) : 0;
      last = cu_seqlens ? min(max(cu_seqlens[d + 1], first), T) : T;
    }
    const int64_t count = (last - first + kTile - 1) / kTile;
    ends[threadIdx.x] = count;
    __syncthreads();
    for (int step = 1; step < kThreads; step *= 2) {
      const int64_t earlier = threadIdx.x >= step ? ends[threadIdx.x - step] : 0;
      __syncthreads();
      ends[threadIdx.x] += earlier;
      __syncthreads();
    }
    const int64_t start = before + ends[threadIdx.x] - count;
    for (int64_t i = 0; i < count && start + i < max_tiles; ++i)
      tiles[start + i] = {first, static_cast<int>(i), static_cast<int>(count), static_cast<int>(min(int64_t{kTile}, last - first - i * kTile))};
    __syncthreads();
    if (threadIdx.x == 0) before += ends[kThreads - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) *num_tiles = static_cast<int>(min(before, max_tiles));
}

// -inf becomes a finite cut that outweighs any score of use, so that differences of sums stay exact numbers.
inline constexpr double kCut = -1e7;

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
