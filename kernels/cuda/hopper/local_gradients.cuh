// What block_adjoint.cuh is given besides the call.
#pragma once

#include "kernels/cuda/hopper/call.cuh"

namespace pathattn::cuda::hopper {

// Rows are [kTile][width] float32 of a tile, as differentiate_pairs leaves them; BlockInputs (pair_adjoint.cuh) says which blocks have any.
struct LocalGradients {
  Tensor dq, dk, dv, dw, dbeta;
  const unsigned char* d_out;  // [query unit][max_tiles] images of d_o, with
  const float* d_out_factors;  // [query unit][max_tiles]
  const float* score_factors;  // [query unit][max_tiles], of output_gradients.cuh
  const float* delta;          // [query unit][max_tiles][kTile]
  const float* dqueries;       // [query unit][max_tiles] rows: gradient of queries at their block's start
  float* dkeys;                // [unit][max_tiles] rows: gradient of keys at their block's end; overwritten
  float* dvalues;              // [unit][max_tiles] rows: gradient of values from later blocks; overwritten
  const float* dmatrices;      // [unit][max_tiles][2][K][K] gradient of each block's G
  float* gate_sums;            // [query unit][max_tiles][kTile] sums of dS over a token's row less over its column, inside the tile; null: no gate
  float* sums;                 // [unit][max_tiles][2][4 sums][max(K, V) / 64][kBlock * kBlock] scratch, with several query heads a key head
  unsigned num_units;
};

}  // namespace pathattn::cuda::hopper
