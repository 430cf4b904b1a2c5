// What block_adjoint.cuh is given besides the call.
#pragma once

#include "kernels/cuda/hopper/call.cuh"

namespace pathattn::cuda::hopper {

// Rows are [kTile][width] float32 of a tile. A document's last tile has no dkeys, dvalues, dmatrices, its first no dqueries and dmatrices.
struct LocalGradients {
  Tensor dq, dk, dv, dw, dbeta;
  const unsigned char* d_out;  // [query unit][max_tiles] images of d_o, with
  const float* d_out_factors;  // [query unit][max_tiles]
  const float* score_factors;  // [query unit][max_tiles], of output_gradients.cuh
  const float* delta;          // [query unit][max_tiles][kTile]
  const float* dqueries;       // [query unit][max_tiles] rows: gradient of queries at their tile's start
  float* dkeys;                // [unit][max_tiles] rows: gradient of keys at their tile's end; overwritten
  float* dvalues;              // [unit][max_tiles] rows: gradient of values from later tiles; overwritten
  const float* dmatrices;      // [unit][max_tiles][2][K][K] gradient of each block's G
  float* gate_sums;            // [query unit][max_tiles][kTile] sums of dS over a token's row less over its column, inside the tile; null: no gate
  float* sums;                 // [unit][max_tiles][2] of block_adjoint.cuh, with several query heads a key head
  unsigned num_units;
};

}  // namespace pathattn::cuda::hopper
