// The tiles of the documents that cu_seqlens cuts a batch row into, found on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace pathattn::cuda {

inline constexpr int kListThreads = 256;

// One CTA lists the tiles of kTokens tokens of a batch row, documents in order; only a document's last tile may have fewer. cu_seqlens null: one
// document of T tokens.
template <int kTokens, typename Tile>
__global__ void list_tiles(const int64_t* cu_seqlens, int64_t num_documents, int64_t T, int64_t max_tiles, Tile* tiles, int* num_tiles) {
  __shared__ int64_t ends[kListThreads];
  __shared__ int64_t before;
  if (threadIdx.x == 0) before = 0;
  for (int64_t d0 = 0; d0 < num_documents; d0 += kListThreads) {
    const int64_t d = d0 + threadIdx.x;
    int64_t first = 0, last = 0;
    if (d < num_documents) {
      first = cu_seqlens ? min(max(cu_seqlens[d], int64_t{0}), T) : 0;
      last = cu_seqlens ? min(max(cu_seqlens[d + 1], first), T) : T;
    }
    const int64_t count = (last - first + kTokens - 1) / kTokens;
    ends[threadIdx.x] = count;
    __syncthreads();
    for (int step = 1; step < kListThreads; step *= 2) {
      const int64_t earlier = threadIdx.x >= step ? ends[threadIdx.x - step] : 0;
      __syncthreads();
      ends[threadIdx.x] += earlier;
      __syncthreads();
    }
    const int64_t start = before + ends[threadIdx.x] - count;
    for (int64_t i = 0; i < count && start + i < max_tiles; ++i)
      tiles[start + i] = {first, static_cast<int>(i), static_cast<int>(count), static_cast<int>(min(int64_t{kTokens}, last - first - i * kTokens))};
    __syncthreads();
    if (threadIdx.x == 0) before += ends[kListThreads - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) *num_tiles = static_cast<int>(min(before, max_tiles));
}

}  // namespace pathattn::cuda
