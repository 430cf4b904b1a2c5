// The backward pass over the segments that the forward pass met: what its kernels share. A segment's scores are a dense rectangle, so each kernel is
// plain attention's: chain.cuh carries the queries through the segments, key_gradients.cuh and query_gradients.cuh recompute the scores once for the
// keys and once for the queries, matrix_gradients.cuh sums the gradients of the nodes' products G. Every sum has one writer and one order.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/ptx.cuh"

namespace pathattn::cuda::hopper {

// What a tile brings to a step of the main loops, for each query unit; the CTA's own tile brings the rest. A tile of queries: S's part of the factor
// to base 2, the power of P, and the unit of dS (delta), times d_out's factor for d_out v (product). A tile of keys: its factor, its share of dS's
// unit (delta), times the values' factor (product). sum: dS back to true units. before: gate up to the tile's start, of keys to its end, as two
// floats.
struct alignas(32) Step {
  float score, power, delta, product, sum, before, before_low, unused;
};

// Arrays are [unit][max_tiles] or [query unit][max_tiles] of what is named, in the tiles' order, if not said otherwise. Without w every G is the
// identity: a query tile meets all earlier tiles in one segment, and there are no chain and no matrix gradients.
struct FarGradient {
  int num_units;  // at work

  const unsigned char* d_out;  // images [V]
  const float* d_out_factors;  // 0 for a tile of zeros
  const float* score_factors;  // |dO v - delta| <= 2^14 times it for the tile's queries and all values of their unit; 0 for a tile of zeros
  const float* delta;          // [kTile], zero beyond the tile's tokens
  const float* row_offsets;    // [kTile] base 2: gate from the tile's start to the query less lse, -infinity beyond the tile's tokens

  // Filled by plan() before the kernels.
  int* key_order;                 // [max_tiles] those that meet the most queries first
  int* query_order;               // [max_tiles] those that meet the most keys first
  int* first_segment;             // [max_tiles] of the tile's in `segments`
  float4* largest;                // [unit] the largest factor of the unit's queries, keys, d_out, scores
  Step *query_steps, *key_steps;  // of each query unit

  int64_t max_segments;       // a query unit's
  unsigned char* segments;    // [query unit][max_segments] images [K] of the queries before a tile's second, third ... segment
  unsigned char* d_segments;  // [query unit][max_segments] images [K]: gradient of the queries after a tile's first, second ... segment
  float* d_segment_factors;

  float* d_queries;               // [kTile][K]
  float* d_keys[kMaxLevels];      // [kTile][K] where the tile's node is not its document's last, and all of level 0
  float* d_values;                // [kTile][V]
  float* d_matrices[kMaxLevels];  // as the call's matrices, [K][K], of nodes but the first that have later siblings
  // With a gate:
  float* row_sums;     // [kTile] of the scores' gradients
  float* column_sums;  // [kTile] for each query unit
};

// Query tiles [first, end) of the later siblings of key tile `index`'s node at `level`. Levels follow one another up to the document's end.
struct LaterTiles {
  int first, end;
  __device__ LaterTiles(int index, int num_tiles, int level, int num_levels) {
    const int node = index >> (2 * level);
    end = level + 1 == num_levels ? num_tiles : min((node / kRadix + 1) * kRadix << (2 * level), num_tiles);
    first = min((node + 1) << (2 * level), end);
  }
};

// Segments that a query tile meets before node `node` of `level`.
__host__ __device__ inline int segment_of(int index, int level, int node) {
  int segment = (index >> (2 * level)) - 1 - node;
  for (int l = 0; l < level; ++l) segment += (index >> (2 * l)) % kRadix;
  return segment;
}
// All of them: those before a node to the left of the document.
__host__ __device__ inline int num_segments(int index, int num_levels) { return segment_of(index, num_levels - 1, -1); }
// Products with a G, and entries in `segments`.
__host__ __device__ inline int num_carries(int index, int num_levels) { return index == 0 ? 0 : num_segments(index, num_levels) - 1; }

// The most that `segments` holds a query unit: when all tiles are one document.
inline int64_t max_carries(int64_t max_tiles, int num_levels) {
  int64_t sum = 0;
  for (int64_t i = 0; i < max_tiles; ++i) sum += num_carries(static_cast<int>(i), num_levels);
  return sum;
}

// So many neighbours in the order are tiles of one document where they can be, so that what they read meets in the second-level cache.
inline constexpr int kTileBand = 8;

// A warp a tile.
template <int kBand>
__global__ void __launch_bounds__(128) order_tiles(const __grid_constant__ Call call, const __grid_constant__ FarGradient far) {
  const int num_tiles = *call.at.num_tiles, slot = blockIdx.x * 4 + threadIdx.x / 32;
  if (slot >= num_tiles) return;
  const auto keys_of = [](const Tile& tile) { return tile.index / kBand; };
  const auto queries_of = [](const Tile& tile) { return (tile.num_tiles - 1 - tile.index) / kBand; };
  const int keys = keys_of(call.at.tiles[slot]), queries = queries_of(call.at.tiles[slot]);
  int key_rank = 0, query_rank = 0, segments = 0;
  for (int i = threadIdx.x % 32; i < num_tiles; i += 32) {
    const Tile other = call.at.tiles[i];
    key_rank += queries_of(other) > queries || (queries_of(other) == queries && i < slot);
    query_rank += keys_of(other) > keys || (keys_of(other) == keys && i < slot);
    if (i < slot && call.w.data) segments += num_carries(other.index, call.num_levels);
  }
  key_rank = __reduce_add_sync(~0u, key_rank);
  query_rank = __reduce_add_sync(~0u, query_rank);
  segments = __reduce_add_sync(~0u, segments);
  if (threadIdx.x % 32 > 0) return;
  far.key_order[key_rank] = slot;
  far.query_order[query_rank] = slot;
  far.first_segment[slot] = segments;
}

// A factor as a share of the largest, so that tiles share an accumulator. One that is too small to matter there, or of zeros, is held in range.
__device__ inline float share_of(float factor, float largest) { return copysignf(fmaxf(fabsf(factor) / largest, 0x1p-30f), factor); }

// A warp a unit.
template <bool kGate>
__global__ void __launch_bounds__(32) find_steps(const __grid_constant__ Call call, const __grid_constant__ FarGradient far) {
  const int num_tiles = *call.at.num_tiles;
  const int64_t unit = blockIdx.x;
  float4 largest = {0x1p-100f, 0x1p-100f, 0x1p-100f, 0x1p-100f};
  for (int i = threadIdx.x; i < num_tiles; i += 32) {
    largest.y = fmaxf(largest.y, call.at.key_factors[unit * call.max_tiles + i]);
    for (int h = 0; h < call.group; ++h) {
      const int64_t row = (unit * call.group + h) * call.max_tiles + i;
      largest.x = fmaxf(largest.x, fabsf(call.at.query_factors[row]));
      largest.z = fmaxf(largest.z, far.d_out_factors[row]);
      largest.w = fmaxf(largest.w, far.score_factors[row]);
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    largest.x = fmaxf(largest.x, __shfl_xor_sync(~0u, largest.x, lanes));
    largest.y = fmaxf(largest.y, __shfl_xor_sync(~0u, largest.y, lanes));
    largest.z = fmaxf(largest.z, __shfl_xor_sync(~0u, largest.z, lanes));
    largest.w = fmaxf(largest.w, __shfl_xor_sync(~0u, largest.w, lanes));
  }
  if (threadIdx.x == 0) far.largest[unit] = largest;
  for (int h = 0; h < call.group; ++h) {
    const int64_t query_unit = unit * call.group + h;
    const auto set_before = [&](Step& step, int tile) {
      if constexpr (!kGate) return;
      const double before = call.at.gate_before[query_unit * (call.max_tiles + 1) + tile];
      step.before = static_cast<float>(before);
      step.before_low = static_cast<float>(before - step.before);
    };
    for (int i = threadIdx.x; i < num_tiles; i += 32) {
      const int64_t row = query_unit * call.max_tiles + i, key_row = unit * call.max_tiles + i;
      const float d_out_share = share_of(far.d_out_factors[row], largest.z), query_share = share_of(call.at.query_factors[row], largest.x);
      Step query{};
      query.score = call.scale * kLog2E * call.at.query_factors[row];
      query.power = 14 + log2f(d_out_share);
      query.delta = 0x1p-14f / d_out_share * query_share / largest.w;
      query.product = query.delta * far.d_out_factors[row];
      query.sum = largest.w / query_share;
      set_before(query, i);
      far.query_steps[row] = query;
      Step key{};
      key.score = call.at.key_factors[key_row];
      key.delta = share_of(call.at.key_factors[key_row], largest.y);
      key.product = key.delta * call.at.value_factors[key_row];
      key.sum = 1 / key.delta;
      set_before(key, i + 1);
      far.key_steps[row] = key;
    }
  }
}

inline cudaError_t plan(const Call& call, const FarGradient& far, cudaStream_t stream) {
  order_tiles<kTileBand><<<static_cast<unsigned>((call.max_tiles + 3) / 4), 128, 0, stream>>>(call, far);
  const auto find = call.at.gate_before ? find_steps<true> : find_steps<false>;
  find<<<far.num_units, 32, 0, stream>>>(call, far);
  return cudaGetLastError();
}

// Work item `number` of num_tiles * num_units: bands of tiles in `order`, unit by unit.
struct Item {
  int slot, unit;
  __device__ Item(unsigned number, const int* order, int num_tiles, int num_units) {
    const int band = number / (kTileBand * num_units) * kTileBand, width = min(kTileBand, num_tiles - band);
    const unsigned rest = number - band * num_units;
    unit = rest / width;
    slot = order[band + rest % width];
  }
};

inline constexpr int kConsumers = 2;                        // warpgroups, of 64 rows each
inline constexpr int kFarThreads = (kConsumers + 1) * 128;  // and one for the producer
inline constexpr int kConsumerWarps = kConsumers * 4;
inline constexpr int kFarStages = 4;
inline constexpr int kSharedBytes = 227 * 1024;

// Buffers in shared memory that one producer thread fills and the consumers' warps release; both sides go through them in the same order.
template <int kStages>
struct Barriers {
  uint64_t full[kStages], empty[kStages];
  __device__ void init(int consumer_warps = kConsumerWarps) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], consumer_warps);
    }
  }
};
template <int kStages>
struct Ring {
  Barriers<kStages>& barriers;
  int stage = 0;
  uint32_t phase = 0;
  __device__ explicit Ring(Barriers<kStages>& barriers) : barriers(barriers) {}
  __device__ void wait_empty() { wait(&barriers.empty[stage], phase ^ 1); }
  __device__ void wait_full() { wait(&barriers.full[stage], phase); }
  __device__ uint64_t* full() const { return &barriers.full[stage]; }
  // By the producer: the next buffer is to hold these bytes.
  __device__ void fill(unsigned char* buffer, const unsigned char* from, uint32_t bytes) {
    wait_empty();
    arrive_expecting(full(), bytes);
    copy_bulk(buffer, from, bytes, full());
    advance();
  }
  // By a consumer's warp, when it has read the buffer.
  __device__ void release() {
    if (threadIdx.x % 32 == 0) arrive(&barriers.empty[stage]);
    advance();
  }
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// `rows` rows of an image, from row `first` on, to panels of so many rows.
template <int D>
__device__ void copy_rows(unsigned char* panels, const unsigned char* image, int first, int rows, uint64_t* barrier) {
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel) {
    copy_bulk(panels + panel * rows * 128, image + panel * kPanelBytes + first * 128, rows * 128, barrier);
  }
}

// A CTA of key_gradients or query_gradients. Body::Rings are the two sides' places in the buffers of Body::Shared.
template <typename Body>
__device__ void work(const Call& call, const FarGradient& far, const int* order, int num_units) {
  const int num_tiles = *call.at.num_tiles;
  if (blockIdx.x >= num_tiles * num_units) return;
  const Item item(blockIdx.x, order, num_tiles, num_units);
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Body::Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    Body::init(shared);
    fence_barrier_init();
  }
  __syncthreads();
  typename Body::Rings rings(shared);
  if (threadIdx.x < 128) {
    lower_registers<24>();
    if (threadIdx.x == 0) Body::produce(call, far, shared, rings, item.slot, item.unit);
  } else {
    raise_registers<240>();
    Body::consume(call, far, shared, rings, item.slot, item.unit);
  }
}

// A consumer's rows of its tile: those of d [64, N]'s registers i with i / 2 % 2 == 0, and 8 rows below.
__device__ inline int consumer_row() { return (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 32 / 4; }

// Rows of an image as wgmma's A.
template <int D>
__device__ void load_rows_as_a(uint32_t (&a)[D / 16][4], const unsigned char* image) {
  const int row = (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 16, column = threadIdx.x % 32 / 16 * 8;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) load_matrices(a[k], shared_address(image) + image_byte(row, 16 * k + column));
}

// d times `factor`, rounded, as wgmma's A.
template <int D>
__device__ void round_rows(uint32_t (&a)[D / 16][4], const float (&d)[D / 2], float factor) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = pack(d[8 * k + 2 * i] * factor, d[8 * k + 2 * i + 1] * factor);
}

// d of all consumers times `factor` to [kTile][D] floats.
template <int D>
__device__ void write_rows(float* rows, const float (&d)[D / 2], float factor) {
#pragma unroll
  for (int i = 0; i < D / 2; i += 2) {
    float* to = rows + (consumer_row() + i / 2 % 2 * 8) * D + i / 4 * 8 + threadIdx.x % 4 * 2;
    *reinterpret_cast<float2*>(to) = {d[i] * factor, d[i + 1] * factor};
  }
}

// A consumer's 64 rows of an image to global memory, through shared memory that only it writes. The copy has been read when the next one begins.
template <int D>
__device__ void write_image(unsigned char* global, unsigned char* shared, const uint32_t (&a)[D / 16][4]) {
  const int group = threadIdx.x / 128 - 1, row = (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 16, column = threadIdx.x % 32 / 16 * 8;
  const bool copies = threadIdx.x % 128 == 0;
  if (copies) wait_bulk_read();
  sync_threads(1 + group, 128);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) store_matrices(shared_address(shared) + image_byte(row, 16 * k + column), a[k]);
  fence_async();
  sync_threads(1 + group, 128);
  if (!copies) return;
  for (int panel = 0; panel < D / 64; ++panel) {
    const int byte = panel * kPanelBytes + group * (kPanelBytes / 2);
    store_bulk(global + byte, shared + byte, kPanelBytes / 2);
  }
  commit_bulk();
}

// Image of the queries of the tile at `row`, [query unit][max_tiles], before its segment `segment`.
template <int K>
__device__ const unsigned char* segment_queries(const Call& call, const FarGradient& far, int64_t query_unit, int64_t row, int first_segment,
                                                int segment) {
  return segment == 0 ? call.at.queries + row * kImageBytes<K>
                      : far.segments + (query_unit * far.max_segments + first_segment + segment - 1) * kImageBytes<K>;
}

}  // namespace pathattn::cuda::hopper
