// Backward's first look at rows of tokens: what d_o, o and lse mean to the attention kernels.
#pragma once

#include "kernels/cuda/hopper/local.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"

namespace pathattn::cuda::hopper {

struct OutputGradients {
  Tensor d_out, d_lse;
  unsigned char* images;  // [query unit][max_tiles] of d_out
  float* factors;         // [query unit][max_tiles]
  float* score_factors;   // [query unit][max_tiles] |d_out v - delta| <= 2^14 times it for the tile's queries and the unit's values
  float* delta;           // [query unit][max_tiles][kTile] sum of d_out * o less d_lse, zero beyond the tile's tokens
  float* row_offsets;     // [query unit][max_tiles][kTile] base 2: gate from the tile's start less lse, -infinity beyond the tile's tokens
};

// A CTA a tile and query head, 16 rows a warp. Needs value_factors of all tiles. With a gate o_rest makes delta exact: where strong gates leave one
// key all the weight, o's rounding would outweigh what is left of dS.
template <int V, bool kGated>
__global__ void __launch_bounds__(kLocalThreads)
    prepare_output_gradients(const __grid_constant__ Call call, const __grid_constant__ OutputGradients at) {
  __shared__ float maxima[3][8];
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  const Unit head = query_unit(call, blockIdx.y);
  const int64_t slot_of_head = slot(call, blockIdx.y, blockIdx.x), unit = blockIdx.y / call.group;
  const int warp = threadIdx.x / 32, row = 16 * warp;
  constexpr int kChunks = V / 8;
  InputRows<V> d_out, out, rest;
  d_out.load(at.d_out, head.b, tile.first(), head.h, row, tile.count);
  out.load(call.out, head.b, tile.first(), head.h, row, tile.count);
  if constexpr (kGated) rest.load(call.out_rest, head.b, tile.first(), head.h, row, tile.count);
  float largest_value = 0, bound = 0, largest_d_lse = 0;
  for (int i = threadIdx.x; i < *call.at.num_tiles; i += kLocalThreads)
    largest_value = fmaxf(largest_value, 64 * call.at.value_factors[slot(call, unit, i)]);  // factor_for's bound
#pragma unroll
  for (int i = 0; i < InputRows<V>::kLoads; ++i) {
    const uint32_t x[4] = {d_out.x[i].x, d_out.x[i].y, d_out.x[i].z, d_out.x[i].w}, y[4] = {out.x[i].x, out.x[i].y, out.x[i].z, out.x[i].w};
    float product = 0, square = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 a = unpack_input(x[j], at.d_out.dtype), b = unpack_input(y[j], call.out.dtype);
      product = fmaf(a.x, b.x, fmaf(a.y, b.y, product));
      if constexpr (kGated) {
        const uint32_t z[4] = {rest.x[i].x, rest.x[i].y, rest.x[i].z, rest.x[i].w};
        const float2 c = unpack_input(z[j], call.out.dtype);
        product = fmaf(a.x, c.x, fmaf(a.y, c.y, product));
      }
      square = fmaf(a.x, a.x, fmaf(a.y, a.y, square));
    }
#pragma unroll
    for (int step = kChunks / 2; step > 0; step /= 2) {
      product += __shfl_xor_sync(0xffffffffu, product, step);
      square += __shfl_xor_sync(0xffffffffu, square, step);
    }
    bound = fmaxf(bound, square);
    const int r = row + (i * 32 + lane_id()) / kChunks;
    if (lane_id() % kChunks != 0) continue;
    const bool inside = r < tile.count;
    const float d_lse = inside && at.d_lse.data ? at.d_lse.at(head.b, tile.first() + r, head.h) : 0.f;
    largest_d_lse = fmaxf(largest_d_lse, fabsf(d_lse));
    float offset = -INFINITY;
    if (inside) {
      offset = -kLog2E * call.lse.at(head.b, tile.first() + r, head.h);
      if (call.at.gate_prefix) {
        const float2 prefix = call.at.gate_prefix[slot_of_head * kTile + r];
        offset += prefix.x + prefix.y;
      }
    }
    at.delta[slot_of_head * kTile + r] = product - d_lse;
    at.row_offsets[slot_of_head * kTile + r] = offset;
  }
  const float parts[3] = {d_out.largest(at.d_out.dtype), warp_max(sqrtf(bound)), warp_max(largest_value)};
  largest_d_lse = warp_max(largest_d_lse);
  __shared__ float d_lse_maxima[8];
  if (lane_id() == 0) {
    for (int i = 0; i < 3; ++i) maxima[i][warp] = parts[i];
    d_lse_maxima[warp] = largest_d_lse;
  }
  __syncthreads();
  const auto most = [](const float(&x)[8]) {
    float most = 0;
    for (float part : x) most = fmaxf(most, part);
    return most;
  };
  const float largest = most(maxima[0]), largest_d_lse_of_all = most(d_lse_maxima), factor = factor_for(largest);
  d_out.store(at.images + slot_of_head * kImageBytes<V>, row, at.d_out.dtype, reciprocal_of_power(factor));
  if (threadIdx.x == 0) {
    at.factors[slot_of_head] = largest == 0 ? 0 : factor;
    const float bound = 2 * most(maxima[1]) * most(maxima[2]) * sqrtf(static_cast<float>(V)) + largest_d_lse_of_all;
    at.score_factors[slot_of_head] = bound == 0 ? 0 : gradient_factor(bound);
  }
}

}  // namespace pathattn::cuda::hopper
