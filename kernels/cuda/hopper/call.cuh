// What every Hopper kernel of a call is given: the problem's tensors and the workspace of the heads at work.
#pragma once

#include "kernels/cuda/hopper/layout.cuh"
#include "kernels/cuda/tensor.cuh"

namespace pathattn::cuda::hopper {

// A unit is a key head of a batch row, a query unit one of its query heads. Arrays of images are [unit][max_tiles] or [query unit][max_tiles].
struct Workspace {
  Tile* tiles;                          // [max_tiles], documents in order
  int* num_tiles;                       // [1]
  unsigned* next_item;                  // [1] of attend's items: zero before
  unsigned char* keys[kMaxLevels];      // [unit] images: K->l of nodes with a later sibling or cousin
  unsigned char* values;                // [unit] images
  unsigned char* matrices[kMaxLevels];  // [unit][max_tiles / 4^l] G of the node that starts at tile slot n 4^l or later: no two share n
  unsigned char* suffixes[kMaxLevels];  // [unit][max_tiles / 4^l] of nodes with two later siblings or more: the product of these siblings' G
  float* key_factors;                   // [unit][max_tiles]
  float* value_factors;                 // [unit][max_tiles]
  unsigned char* queries;               // [query unit] images: queries carried to their tile's start
  float* query_factors;                 // [query unit][max_tiles], of the scale's sign
  uint32_t* local_out;  // [query unit][max_tiles][8 warps][V / 8][2][32 lanes] float16 pairs: attention inside the tile, a fragment of mma's d
  float* local_lse;     // [query unit][max_tiles][kTile] base 2
  // With a gate, all in base 2 and with the gate's factor:
  float2* gate_prefix;  // [query unit][max_tiles][kTile] sum from the tile's start to the token, as two floats
  float* gate_suffix;   // [query unit][max_tiles][kTile] sum after the token to the tile's end
  double* gate_before;  // [query unit][max_tiles + 1] sum up to the tile's start, from the first document on
  // In backward, of a tile's two blocks of 64 tokens; images with the tile's factors. Null in forward.
  unsigned char* block_queries;   // [query unit][max_tiles] 64 rows: queries of block 1, where it has tokens, carried to its start
  unsigned char* block_keys;      // [unit][max_tiles] 64 rows: keys of block 0 carried to its end
  unsigned char* block_matrices;  // [unit][max_tiles][2] G of each block
  // In backward with w, of the UT transform of a tile's blocks:
  unsigned char* transform_w;  // [unit][max_tiles] images, rows as WRows makes them
  float* transform_factors;    // [unit][max_tiles][2]
  unsigned char* transform_u;  // [unit][max_tiles] images of -U / factor
  unsigned char* transform_x;  // [unit][max_tiles][2] 64 x 64 of -X / factor, of keys as stored
  unsigned char* transform_y;  // [unit][max_tiles][2][2] 64 x 64: both terms of (I + N)^-1
  float* transform_rows;       // [unit][max_tiles][2][kTile] beta as W is stored, the powers of two that rows of w were divided by
  unsigned* arrivals;          // [unit][max_tiles] of differentiate_carry's CTAs at a parent's first tile; zero between levels
};

struct Call {
  Tensor q, k, v, w, beta, g, out, out_rest, lse;
  int64_t max_tiles;
  int heads, group;    // key heads, query heads a key head
  int64_t first_unit;  // of the units at work; grids count from 0
  int num_levels;
  float scale, gate_factor;
  Workspace at;
};

struct Unit {
  int64_t local, b;  // local: among the units at work
  int h;
  // There are fewer than 2^31 of them: a division of 32 bits is a fifth of one of 64.
  __device__ Unit(int64_t local, int heads, int64_t first)
      : local(local), b(static_cast<unsigned>(first + local) / heads), h(static_cast<int>(static_cast<unsigned>(first + local) % heads)) {}
};
__device__ inline Unit key_unit(const Call& call, int64_t local) { return Unit(local, call.heads, call.first_unit); }
__device__ inline Unit query_unit(const Call& call, int64_t local) { return Unit(local, call.heads * call.group, call.first_unit * call.group); }

// Slot of a tile's image or factor, of a unit or query unit.
__device__ inline int64_t slot(const Call& call, int64_t unit, int64_t tile) { return unit * call.max_tiles + tile; }
// Slot of the matrix of the level-l node that starts at tile slot `tile`.
__device__ inline int64_t matrix_slot(const Call& call, int64_t unit, int64_t tile, int level) {
  return unit * ((call.max_tiles >> (2 * level)) + 1) + (tile >> (2 * level));
}

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

}  // namespace pathattn::cuda::hopper
