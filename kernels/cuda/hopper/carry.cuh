// From one level of nodes to the next, four times larger: G of the parents, and keys carried to their parent's end.
#pragma once

#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/fragments.cuh"

namespace pathattn::cuda::hopper {

inline constexpr int kCarryThreads = 256;  // 16 rows of a tile a warp

// First tile (of its document) behind the level-`level` node that holds tile `index`.
__device__ inline int node_end(int index, int level) { return ((index >> (2 * level)) + 1) << (2 * level); }

// All of a CTA's threads; what is copied is there after a barrier.
__device__ inline void copy_image(unsigned char* to, const unsigned char* from, int bytes) {
#pragma unroll 8
  for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
}

// A CTA a parent node (at its first tile) of level `level` + 1 and key head, 16 rows a warp: G3, G3 G2, G3 G2 G1 for the children, all four for
// itself.
template <int K>
__global__ void __launch_bounds__(2 * K) multiply_matrices(const __grid_constant__ Call call, int level) {
  extern __shared__ __align__(1024) unsigned char shared[];
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  const int child = 1 << (2 * level), parent = child * kRadix;
  if (tile.index % parent != 0 || tile.index + parent >= tile.num_tiles) return;
  const auto matrix_at = [&](unsigned char* array, int c, int at_level) {
    return array + matrix_slot(call, blockIdx.y, blockIdx.x + c * child, at_level) * kMatrixBytes<K>;
  };
  const int row = threadIdx.x / 32 * 16;
  uint32_t product[K / 16][4];
  const unsigned char* last = matrix_at(call.at.matrices[level], kRadix - 1, level);
#pragma unroll
  for (int k = 0; k < K / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) product[k][i] = load_pair(last, row + i % 2 * 8, 16 * k + i / 2 * 8, K);
  for (int c = 0; c < kRadix - 1; ++c) copy_image(shared + c * kMatrixBytes<K>, matrix_at(call.at.matrices[level], c, level), kMatrixBytes<K>);
  __syncthreads();
#pragma unroll 1
  for (int c = kRadix - 2; c >= 0; --c) {
    float d[K / 8][4];
    clear(d);
#pragma unroll
    for (int k = 0; k < K / 16; ++k) multiply_a_rows(d, product[k], shared_address(shared + c * kMatrixBytes<K>), 16 * k, 0, K);
    store_rows(c > 0 ? matrix_at(call.at.suffixes[level], c - 1, level) : matrix_at(call.at.matrices[level + 1], 0, level + 1), d, row, 0, K);
#pragma unroll
    for (int k = 0; k < K / 16; ++k) round_to_a(product[k], d, k);
  }
}

// A CTA a tile and key head: its keys from their level-`level` node's end to the parent's.
template <int K>
__global__ void __launch_bounds__(kCarryThreads) carry_keys(const __grid_constant__ Call call, int level) {
  extern __shared__ __align__(1024) unsigned char shared[];
  if (blockIdx.x >= *call.at.num_tiles) return;
  const Tile tile = call.at.tiles[blockIdx.x];
  if (node_end(tile.index, level + 1) >= tile.num_tiles) return;
  const int64_t at = slot(call, blockIdx.y, blockIdx.x) * kImageBytes<K>;
  const unsigned char* keys = call.at.keys[level] + at;
  unsigned char* carried = call.at.keys[level + 1] + at;
  const int c = (tile.index >> (2 * level)) % kRadix;
  if (c == kRadix - 1) return copy_image(carried, keys, kImageBytes<K>);
  const int64_t node = blockIdx.x - tile.index + (tile.index >> (2 * level) << (2 * level));  // its first tile's slot
  const unsigned char* suffix = c == kRadix - 2
                                    ? call.at.matrices[level] + matrix_slot(call, blockIdx.y, node + (1 << (2 * level)), level) * kMatrixBytes<K>
                                    : call.at.suffixes[level] + matrix_slot(call, blockIdx.y, node, level) * kMatrixBytes<K>;
  unsigned char* const rows = shared + kMatrixBytes<K>;
  copy_image(shared, suffix, kMatrixBytes<K>);
  copy_image(rows, keys, kImageBytes<K>);
  __syncthreads();
  const int row = threadIdx.x / 32 * 16;
  float d[K / 8][4];
  clear(d);
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    uint32_t a[4];
    load_a(a, shared_address(rows), row, k);
    multiply_a_columns(d, a, shared_address(shared), k, 0, K);
  }
  __syncwarp();
  store_rows(rows, d, row, 0);  // a warp's rows are its own
  __syncthreads();
  copy_image(carried, rows, kImageBytes<K>);
}

}  // namespace pathattn::cuda::hopper
