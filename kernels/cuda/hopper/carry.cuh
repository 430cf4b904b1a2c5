// From one level of nodes to the next, four times larger: products of the children's G, keys carried to their parent's end. With children
// c = 0 ... 3 of a parent, S_3 = I and S_{c-1} = S_c G_c: a child's keys become K S_c^T, the parent's G is S_{-1}.
#pragma once

#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/local.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"

namespace pathattn::cuda::hopper {

// First tile (of its document) behind the level-`level` node that holds tile `index`.
__host__ __device__ inline int node_end(int index, int level) { return ((index >> (2 * level)) + 1) << (2 * level); }

// The CTAs of a level take the tiles of a child in runs: nodes of this level.
__host__ __device__ inline int run_level(int level) { return level < 1 ? level : 1; }

// The node of a level that reaches over tile slot (n + 1) 4^level - 1; whole nodes all have an n of their own.
struct Node {
  int64_t first = 0;     // its first tile's slot
  int index = 0;         // and place in the document
  bool carried = false;  // something of the document follows its ancestor of level `ancestor`, which is whole then
  __device__ Node(const Call& call, int64_t n, int level, int ancestor) {
    const int64_t last = ((n + 1) << (2 * level)) - 1;
    if (last >= *call.at.num_tiles) return;
    const Tile tile = call.at.tiles[last];
    index = tile.index >> (2 * level) << (2 * level);
    first = last - (tile.index - index);
    carried = node_end(tile.index, ancestor) < tile.num_tiles;
  }
};

template <int K>
struct CarryMemory {
  static constexpr int kMatrix = 0, kItems = kMatrixBytes<K>, kBarriers = kItems + 2 * kImageBytes<K>, kTotal = kBarriers + 3 * 8;
};

// A CTA a run of tiles of a child of level `level` and key head, a warp 16 rows of the child's S and of each tile (width 64: twice 16). What is
// multiplied comes in order through two buffers: G_2 ... down to G_{c+1}, once more for the parent's G, and the keys.
template <int K>
__global__ void __launch_bounds__(2 * K, K == 64 ? 5 : 2) carry_nodes(const __grid_constant__ Call call, int level) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Memory = CarryMemory<K>;
  constexpr int kGroups = K / 64;
  const int run = run_level(level);
  const Node node(call, blockIdx.x, run, level + 1);
  if (!node.carried) return;
  const int64_t unit = blockIdx.y;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), row = 16 * warp;
  const int c = (node.index >> (2 * level)) % kRadix, child = 1 << (2 * level), in_child = node.index % child;
  const int64_t parent = node.first - in_child - c * child;
  const bool is_first = in_child == 0;  // of the child's runs
  const int num_matrices = c == kRadix - 1 ? 0 : kRadix - 2 - c + (c == 0 && is_first), num_items = num_matrices + (1 << (2 * run));
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + Memory::kBarriers);  // two items', S's
  unsigned char* const suffix = shared + Memory::kMatrix;
  const auto item_at = [&](int i) { return shared + Memory::kItems + i % 2 * kImageBytes<K>; };
  const auto matrix_at = [&](unsigned char* matrices, int j, int at_level) {
    return matrices + matrix_slot(call, unit, parent + j * child, at_level) * kMatrixBytes<K>;
  };
  const auto keys_at = [&](int at_level, int i) { return call.at.keys[at_level] + slot(call, unit, node.first + i - num_matrices) * kImageBytes<K>; };
  const auto load = [&](void* to, const unsigned char* from, int bytes, uint64_t* barrier) {
    arrive_expecting(barrier, bytes);
    copy_bulk(to, from, bytes, barrier);
  };
  const auto load_item = [&](int i) {
    if (i < num_matrices)
      load(item_at(i), matrix_at(call.at.matrices[level], kRadix - 2 - i, level), kMatrixBytes<K>, barriers + i % 2);
    else
      load(item_at(i), keys_at(level, i), kImageBytes<K>, barriers + i % 2);
  };
  // A warp's 16 rows, once they stand in shared memory for all kinds of readers.
  const auto send_rows = [&](unsigned char* to, const unsigned char* from, int first, int panel_rows) {
    __syncwarp();
    if (lane_id() != 0) return;
#pragma unroll
    for (int panel = 0; panel < K / 64; ++panel) {
      const int at = (panel * panel_rows + first) * 128;
      store_bulk(to + at, from + at, 16 * 128);
    }
    commit_bulk();
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) init_barrier(barriers + i, 1);
    fence_barrier_init();
    if (c < kRadix - 1) load(suffix, matrix_at(call.at.matrices[level], kRadix - 1, level), kMatrixBytes<K>, barriers + 2);
    load_item(0);
    if (num_items > 1) load_item(1);
    if (call.at.arrivals && level == 0 && c == 0) call.at.arrivals[slot(call, unit, parent)] = 0;
  }
  __syncthreads();
  if (c < kRadix - 1) wait(barriers + 2, 0);
  if (num_matrices > 0) {
    uint32_t a[K / 16][4];
#pragma unroll
    for (int k = 0; k < K / 16; ++k) load_a(a[k], shared_address(suffix), row, 16 * k, K);
#pragma unroll 1
    for (int i = 0; i < num_matrices; ++i) {
      const int j = kRadix - 2 - i;  // S_{j-1} = S_j G_j
      wait(barriers + i % 2, i / 2);
      {
        float d[K / 2];
        const uint64_t matrix = descriptor(item_at(i), K * 128);
        wgmma_fence();
        wgmma_first<1>(d, a[0], matrix);
#pragma unroll
        for (int k = 1; k < K / 16; ++k) wgmma<1>(d, a[k], advance(matrix, k * 2048), true);
        wgmma_commit();
        wgmma_wait<0>();
        hold(d);
        round_rows(a, d);
      }
      __syncthreads();  // all have read G_j
      if (j == c + 1) {
        write_rounded(suffix, a, row, K);  // a warp alone has read these rows
        fence_async();
        if (is_first) send_rows(matrix_at(call.at.suffixes[level], c, level), suffix, row, K);
      } else if (j == 0) {
        write_rounded(item_at(i), a, row, K);
        fence_async();
        send_rows(matrix_at(call.at.matrices[level + 1], 0, level + 1), item_at(i), row, K);
        if (lane_id() == 0) wait_bulk_read();
        __syncthreads();
      }
      if (threadIdx.x == 0 && i + 2 < num_items) load_item(i + 2);
    }
    __syncthreads();  // S_c stands
  }
#pragma unroll 1
  for (int i = num_matrices; i < num_items; ++i) {
    unsigned char *const keys = item_at(i), *const carried = keys_at(level + 1, i);
    wait(barriers + i % 2, i / 2 % 2);
    if (c < kRadix - 1) {
#pragma unroll
      for (int first = 0; first < kTile; first += kBlock * kGroups) {
        float d[K / 2];
        const uint64_t left = descriptor(keys + (first + row / kBlock * kBlock) * 128), right = descriptor(suffix);
        wgmma_fence();
        wgmma_first<0, 0>(d, left, right);
#pragma unroll
        for (int k = 1; k < K / 16; ++k)
          wgmma<0, 0>(d, advance(left, k / 4 * kPanelBytes + k % 4 * 32), advance(right, k / 4 * (K * 128) + k % 4 * 32), true);
        wgmma_commit();
        wgmma_wait<0>();
        hold(d);
        __syncthreads();  // warpgroups have read their rows
        write_rows(keys, d, first + row);
        fence_async();
        send_rows(carried, keys, first + row, kTile);
      }
    } else if (threadIdx.x == 0) {
      store_bulk(carried, keys, kImageBytes<K>);
      commit_bulk();
    }
    if (lane_id() == 0) wait_bulk_read();
    if (i + 2 < num_items) {
      __syncthreads();
      if (threadIdx.x == 0) load_item(i + 2);
    }
  }
}

}  // namespace pathattn::cuda::hopper
