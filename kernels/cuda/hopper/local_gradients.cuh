// What local_adjoint.cuh is given besides the call, and its scratch memory.
#pragma once

#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"

namespace pathattn::cuda::hopper {

// Rows are [kTile][width] float32 of a tile. A document's last tile has no dkeys, dvalues, dmatrices, its first no dqueries and dmatrices.
struct LocalGradients {
  Tensor dq, dk, dv, dw, dbeta;
  const unsigned char* d_out;  // [query unit][max_tiles] images of d_o, with
  const float* d_out_factors;  // [query unit][max_tiles]
  const float* delta;          // [query unit][max_tiles][kTile]
  const float* dqueries;       // [query unit][max_tiles] rows: gradient of queries at their tile's start
  const float* dkeys;          // [unit][max_tiles] rows: gradient of keys at their tile's end
  float* dvalues;              // [unit][max_tiles] rows: gradient of values from later tiles; overwritten
  const float* dmatrices;      // [unit][max_tiles + 1][K][K] gradient of each tile's G, at matrix_slot
  float* gate_sums;            // [query unit][max_tiles][kTile] sums of dS over a token's row less over its column, inside the tile; null: no gate
  unsigned char* scratch;      // [CTAs][kAdjointScratchBytes]
  int num_units;
};

inline constexpr int kAdjointThreads = 512;
inline constexpr int kSquareBytes = 2 * kPanelBytes;  // a 128 x 128 image
inline constexpr int kSumFloats = kBlock * kBlock;    // of a block of a scratch sum
inline constexpr int kAdjointScratchBytes = 2 * kSquareBytes + kBlockBytes + 16 * kSumFloats * 4 + 10 * kTile * 4;

}  // namespace pathattn::cuda::hopper
