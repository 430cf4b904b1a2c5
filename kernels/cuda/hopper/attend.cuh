// The main stage of forward: a query tile meets the segments to its left (layout.cuh), dense rectangles of scores, by wgmma. A persistent CTA a
// multiprocessor: one warp copies keys, values and G in the order of use, with a gate one writes its part of the keys' scores, two warpgroups take 64
// query rows each.
#pragma once

#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/fragments.cuh"
#include "kernels/cuda/hopper/input.cuh"

namespace pathattn::cuda::hopper {

inline constexpr int kAttendThreads = 384;                               // warpgroup 0 copies (warp 0; gates warp 1), 1 and 2 compute
inline constexpr int kCopyingRegisters = 56, kComputingRegisters = 224;  // a thread

template <int K, int V>
struct AttendMemory {
  static constexpr int kStages = K == 64 && V == 64 ? 4 : 3, kItemStages = 2;
  static constexpr int kKeys = 0, kValues = kKeys + kStages * kImageBytes<K>;  // a stage of keys also holds G
  static constexpr int kBias = kValues + kStages * kImageBytes<V>;             // the gate's part of each key's scores, beside its keys
  static constexpr int kNumbers = kBias + kStages * kTile * 8;                 // KeyNumbers of each stage of keys
  static constexpr int kBarriers = kNumbers + kStages * 16;                    // full and empty of each stage: keys, values, items
  static constexpr int kItems = kBarriers + 4 * (kStages + kItemStages) * 8;
  static constexpr int kTotal = kItems + kItemStages * 4;
};

// What a tile of keys' scores and values are multiplied by, and the gate's part from the tile's end to the query tile's start.
struct alignas(16) KeyNumbers {
  float score_factor, value_factor, bias;
};

// Stages of one operand in a ring.
template <int kStages>
struct StageRing {
  uint64_t* full;
  uint64_t* empty;
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ void wait_full() const { wait(full + stage, parity); }
  __device__ void wait_empty() const { wait(empty + stage, parity ^ 1); }
  __device__ void release() {  // by each computing warp, done with the stage
    __syncwarp();
    if (lane_id() == 0) arrive(empty + stage);
    next();
  }
};

// The segments of a query tile, right to left, as both sides walk them. visit(level, node, is_last).
template <bool kPath, typename Visit>
__device__ void for_each_segment(const Call& call, const Tile& tile, Visit visit) {
  if (tile.index == 0) return;
  if constexpr (!kPath) {
    visit(0, 0, tile.index, true);
  } else {
    for (int level = 0; level < call.num_levels; ++level) {
      const Siblings siblings(tile.index, level, call.num_levels);
      for (int node = siblings.last; node >= siblings.first; --node) visit(level, node << (2 * level), 1 << (2 * level), node == 0);
    }
  }
}

template <int K, int V, bool kPath, bool kGated>
struct Attend {
  using Memory = AttendMemory<K, V>;
  using DataRing = StageRing<Memory::kStages>;
  using ItemRing = StageRing<Memory::kItemStages>;
  const Call& call;
  unsigned char* shared;

  __device__ uint64_t* barriers() const { return reinterpret_cast<uint64_t*>(shared + Memory::kBarriers); }
  __device__ DataRing key_ring() const { return {barriers(), barriers() + Memory::kStages}; }
  __device__ DataRing value_ring() const { return {barriers() + 2 * Memory::kStages, barriers() + 3 * Memory::kStages}; }
  __device__ ItemRing item_ring() const { return {barriers() + 4 * Memory::kStages, barriers() + 4 * Memory::kStages + Memory::kItemStages}; }
  __device__ KeyNumbers* numbers() const { return reinterpret_cast<KeyNumbers*>(shared + Memory::kNumbers); }
  // Of columns 2 i and 2 i + 1, as a thread's four sums of two rows begin.
  __device__ float4* biases(int stage) const { return reinterpret_cast<float4*>(shared + Memory::kBias) + stage * (kTile / 2); }
  __device__ unsigned* items() const { return reinterpret_cast<unsigned*>(shared + Memory::kItems); }

  __device__ void init() const {
    const auto init_ring = [](auto ring, int stages, int writers, int readers) {
      for (int stage = 0; stage < stages; ++stage) {
        init_barrier(ring.full + stage, writers);
        init_barrier(ring.empty + stage, readers);
      }
    };
    constexpr int kComputingWarps = (kAttendThreads - 128) / 32;
    init_ring(key_ring(), Memory::kStages, kGated ? 2 : 1, kComputingWarps);
    init_ring(value_ring(), Memory::kStages, 1, kComputingWarps);
    init_ring(item_ring(), Memory::kItemStages, 1, kComputingWarps + (kGated ? 1 : 0));
    fence_barrier_init();
  }

  // Item i of all query tiles: heads in order, the longest first in each.
  struct Item {
    int query, slot;  // slot: the tile's
  };
  __device__ Item item(unsigned i, int num_tiles) const { return {static_cast<int>(i / num_tiles), static_cast<int>(num_tiles - 1 - i % num_tiles)}; }

  // Takes items in the order in which CTAs get to them and hands each on to the computing warpgroups; one past the last ends both.
  __device__ unsigned take_item(ItemRing& ring) const {
    const unsigned i = atomicAdd(call.at.next_item, 1u);
    ring.wait_empty();
    items()[ring.stage] = i;
    arrive(ring.full + ring.stage);
    ring.next();
    return i;
  }
  __device__ unsigned receive_item(ItemRing& ring) const {
    ring.wait_full();
    const unsigned i = items()[ring.stage];
    ring.release();
    return i;
  }

  // Where an item's document begins in arrays of tiles, and what its queries' products are multiplied by. 32 bits hold any slot, images being 16 KB.
  struct Place {
    Tile tile;
    int first_slot, of_keys, of_gates;
    float query_factor;
  };
  __device__ Place place(const Item& work) const {
    const Tile tile = call.at.tiles[work.slot];
    const int max_tiles = static_cast<int>(call.max_tiles), first_slot = work.slot - tile.index;
    const int of_keys = work.query / call.group * max_tiles + first_slot, of_gates = work.query * max_tiles + first_slot;
    return {tile, first_slot, of_keys, of_gates, kLog2E * call.scale * call.at.query_factors[of_gates + tile.index]};
  }
  // Never so small that a gate's sum divided by it would overflow; products are nothing beside such a sum then.
  __device__ float score_factor(const Place& at, int index) const { return fmaxf(at.query_factor * call.at.key_factors[at.of_keys + index], 1e-28f); }

  __device__ void copy(unsigned num_items, int num_tiles) const {
    DataRing keys = key_ring(), values = value_ring();
    ItemRing ring = item_ring();
    for (unsigned i = take_item(ring); i < num_items; i = take_item(ring)) {
      const Item work = item(i, num_tiles);
      const Place at = place(work);
      const Tile& tile = at.tile;
      for_each_segment<kPath>(call, tile, [&](int level, int first, int count, bool is_last) {
        const auto copy_values = [&](int index) {
          values.wait_empty();
          arrive_expecting(values.full + values.stage, kImageBytes<V>);
          copy_bulk(shared + Memory::kValues + values.stage * kImageBytes<V>, call.at.values + int64_t{at.of_keys + index} * kImageBytes<V>,
                    kImageBytes<V>, values.full + values.stage);
          values.next();
        };
        for (int t = first + count - 1; t >= first; --t) {
          const int index = opaque(t);
          KeyNumbers key{score_factor(at, index), call.at.value_factors[at.of_keys + index], 0};
          if constexpr (kGated) {
            const double* before = call.at.gate_before + (at.of_gates + work.query);
            key.bias = static_cast<float>(before[tile.index] - before[index + 1]);
          }
          keys.wait_empty();
          numbers()[keys.stage] = key;
          arrive_expecting(keys.full + keys.stage, kImageBytes<K>);
          copy_bulk(shared + Memory::kKeys + keys.stage * kImageBytes<K>, call.at.keys[level] + int64_t{at.of_keys + index} * kImageBytes<K>,
                    kImageBytes<K>, keys.full + keys.stage);
          keys.next();
          if (index + 1 < first + count) copy_values(index + 1);
        }
        if (kPath && !is_last) {
          keys.wait_empty();
          arrive_expecting(keys.full + keys.stage, kMatrixBytes<K>);
          copy_bulk(shared + Memory::kKeys + keys.stage * kImageBytes<K>,
                    call.at.matrices[level] + matrix_slot(call, work.query / call.group, at.first_slot + first, level) * kMatrixBytes<K>,
                    kMatrixBytes<K>, keys.full + keys.stage);
          keys.next();
        }
        copy_values(first);
      });
    }
  }

  // The gate's part of the scores of each key, in the unit of the products, which are added to it: so softmax needs no instruction for it.
  __device__ void write_biases(unsigned num_items, int num_tiles) const {
    DataRing keys = key_ring();
    ItemRing ring = item_ring();
    for (unsigned i = receive_item(ring); i < num_items; i = receive_item(ring)) {
      const Place at = place(item(i, num_tiles));
      const auto arrive_with = [&](auto write) {
        keys.wait_empty();
        write();
        __syncwarp();
        if (lane_id() == 0) arrive(keys.full + keys.stage);
        keys.next();
      };
      for_each_segment<kPath>(call, at.tile, [&](int, int first, int count, bool is_last) {
        for (int t = first + count - 1; t >= first; --t) {
          const float4 sums = reinterpret_cast<const float4*>(call.at.gate_suffix + int64_t{at.of_gates + t} * kTile)[lane_id()];
          const float by = 1 / score_factor(at, t);
          arrive_with([&] {
            float4* two_columns = biases(keys.stage) + 2 * lane_id();
            two_columns[0] = {sums.x * by, sums.y * by, sums.x * by, sums.y * by};
            two_columns[1] = {sums.z * by, sums.w * by, sums.z * by, sums.w * by};
          });
        }
        if (kPath && !is_last) arrive_with([] {});  // G's stage
      });
    }
  }

  __device__ void compute(unsigned num_items, int num_tiles) const {
    DataRing keys = key_ring(), values = value_ring();
    ItemRing ring = item_ring();
    const int warp = threadIdx.x / 32 - 4;  // 0 ... 7: rows 16 warp of the tile
    for (unsigned i = receive_item(ring); i < num_items; i = receive_item(ring)) {
      const Item work = item(i, num_tiles);
      const Tile tile = call.at.tiles[work.slot];
      const int unit = work.query / call.group, first_slot = work.slot - tile.index;
      const int64_t at_query = slot(call, work.query, work.slot);

      uint32_t q[K / 16][4];
      const unsigned char* queries = call.at.queries + at_query * kImageBytes<K>;
#pragma unroll
      for (int k = 0; k < K / 16; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j) q[k][j] = load_pair(queries, 16 * warp + j % 2 * 8, 16 * k + j / 2 * 8);
      float out_factor = call.at.value_factors[slot(call, unit, work.slot)];  // of what `out` holds
      float out[V / 2], largest[2], sum[2], row_bias[2];
      const uint32_t* local_out = call.at.local_out + (at_query * 8 + warp) * (V / 8 * 64) + lane_id();
#pragma unroll
      for (int n = 0; n < V / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 pair = unpack(local_out[n * 64 + half * 32]);
          out[4 * n + 2 * half] = pair.x;
          out[4 * n + 2 * half + 1] = pair.y;
        }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = at_query * kTile + 16 * warp + fragment_row() + 8 * half;
        largest[half] = call.at.local_lse[row];
        sum[half] = lane_id() % 4 == 0;
        if constexpr (kGated) row_bias[half] = call.at.gate_prefix[row].x + call.at.gate_prefix[row].y;
      }

      uint32_t p[kTile / 16][4];
      float s[kTile / 2];
      const auto start_scores = [&]() {  // of the gate's part of the columns
        if constexpr (kGated) {
          const float4* two_columns = biases(keys.stage) + fragment_column() / 2;
#pragma unroll
          for (int n = 0; n < kTile / 2; n += 4) {
            const float4 bias = two_columns[n];
            s[n] = bias.x, s[n + 1] = bias.y, s[n + 2] = bias.z, s[n + 3] = bias.w;
          }
        }
      };
      const auto scores = [&]() {  // s = q K^T
        const uint64_t at = descriptor(shared + Memory::kKeys + keys.stage * kImageBytes<K>);
        keys.wait_full();
        start_scores();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K / 16; ++k) wgmma<0>(s, q[k], advance(at, k / 4 * kPanelBytes + k % 4 * 32), kGated || k > 0);
        wgmma_commit();
      };
      const auto scores_again = [&]() {  // by the warp alone
        const uint32_t image = shared_address(shared + Memory::kKeys + keys.stage * kImageBytes<K>);
#pragma unroll
        for (int n = 0; n < kTile / 2; ++n) s[n] = 0;
        start_scores();
#pragma unroll
        for (int n = 0; n < kTile / 16; ++n) {
          float left[4], right[4];  // columns from 16 n and from 16 n + 8 on
#pragma unroll
          for (int i = 0; i < 4; ++i) left[i] = s[8 * n + i], right[i] = s[8 * n + 4 + i];
#pragma unroll
          for (int k = 0; k < K / 16; ++k) {
            uint32_t of_keys[4];
            load_a(of_keys, image, 16 * n, 16 * k);
            mma(left, q[k], of_keys[0], of_keys[2]);
            mma(right, q[k], of_keys[1], of_keys[3]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) s[8 * n + i] = left[i], s[8 * n + 4 + i] = right[i];
        }
      };
      const auto add_values = [&]() {  // out += P V
        const uint64_t at = descriptor(shared + Memory::kValues + values.stage * kImageBytes<V>, kPanelBytes);
        values.wait_full();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) wgmma<1>(out, p[k], advance(at, k * 2048), true);
        wgmma_commit();
      };
      // s becomes exp2(score - largest), the rows' sums follow. P and the sums have room, so `largest` need not be the rows' maximum: maxima are
      // looked for, and `out` is multiplied by `decay`, only where a sum of this tile's shows that a number has outgrown that room.
      constexpr float kRoom = 32768;
      bool decays;
      float decay[2];
      const auto softmax = [&]() {
        const KeyNumbers key = numbers()[keys.stage];
        float base[2], sums[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) base[half] = kGated ? row_bias[half] + key.bias : 0.f;
        const auto exponentiate = [&]() {
          const float offset[2] = {largest[0] - base[0], largest[1] - base[1]};
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[i] = 0;  // four chains, which do not wait for each other
#pragma unroll
          for (int n = 0; n < kTile / 2; ++n) {
            s[n] = exp2_fast(fmaf(s[n], key.score_factor, -offset[n / 2 % 2]));
            sums[n % 4] += s[n];
          }
        };
        // `out` takes the largest factor of any values met; P carries what the others lack.
        decays = key.value_factor > out_factor;
        if (decays) {
          decay[0] = decay[1] = out_factor * reciprocal_of_power(key.value_factor);
          out_factor = key.value_factor;
        }
        exponentiate();
        if (!__all_sync(0xffffffffu, sums[0] + sums[1] <= kRoom && sums[2] + sums[3] <= kRoom)) {
          scores_again();
          float most[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
          for (int n = 4; n < kTile / 2; ++n) most[n % 4] = fmaxf(most[n % 4], s[n]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float highest = fmaf(row_max(fmaxf(most[2 * half], most[2 * half + 1])), key.score_factor, base[half]);
            const float new_largest = fmaxf(largest[half], highest), by = exp2_fast(largest[half] - new_largest);
            largest[half] = new_largest;
            sum[half] *= by;
            decay[half] = decays ? decay[half] * by : by;
          }
          decays = true;
          exponentiate();
        }
        keys.release();
        sum[0] += sums[0] + sums[1];
        sum[1] += sums[2] + sums[3];
        if (key.value_factor != out_factor) {
          const float shift = key.value_factor * reciprocal_of_power(out_factor);
#pragma unroll
          for (int n = 0; n < kTile / 2; ++n) s[n] *= shift;
        }
      };
      const auto round_and_rescale = [&]() {
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k)
#pragma unroll
          for (int j = 0; j < 4; ++j) p[k][j] = pack(s[8 * k + 2 * j], s[8 * k + 2 * j + 1]);
        if (!decays) return;
#pragma unroll
        for (int n = 0; n < V / 2; ++n) out[n] *= decay[n / 2 % 2];
      };
      for_each_segment<kPath>(call, tile, [&](int level, int first, int count, bool is_last) {
        scores();
        wgmma_wait<0>();
        hold(s);
        softmax();
        round_and_rescale();
        for (int t = count - 2; t >= 0; --t) {
          scores();
          add_values();
          wgmma_wait<1>();
          hold(s);
          softmax();
          wgmma_wait<0>();
          hold(out);
          values.release();
          round_and_rescale();
        }
        if (kPath && !is_last) {
          float carried[K / 2];
          const uint64_t at = descriptor(shared + Memory::kKeys + keys.stage * kImageBytes<K>, kMatrixBytes<K> / (K / 64));
          keys.wait_full();
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < K / 16; ++k) wgmma<1>(carried, q[k], advance(at, k * 2048), k > 0);
          wgmma_commit();
          add_values();
          wgmma_wait<1>();
          hold(carried);
          keys.release();
#pragma unroll
          for (int k = 0; k < K / 16; ++k)
#pragma unroll
            for (int j = 0; j < 4; ++j) q[k][j] = pack(carried[8 * k + 2 * j], carried[8 * k + 2 * j + 1]);
        } else {
          add_values();
        }
        wgmma_wait<0>();
        hold(out);
        values.release();
      });

      const Unit head = query_unit(call, work.query);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + fragment_row() + 8 * half;
        const float total = row_sum(sum[half]);
        const float by = out_factor / total;
        if (row >= tile.count) continue;
        const auto row_of = [&](const Tensor& tensor) {
          return static_cast<uint16_t*>(tensor.data) + head.b * tensor.batch_stride + (tile.first() + row) * tensor.token_stride +
                 head.h * tensor.head_stride + fragment_column();
        };
        uint16_t* const at = row_of(call.out);
#pragma unroll
        for (int n = 0; n < V / 8; ++n) {
          const float x = out[4 * n + 2 * half] * by, y = out[4 * n + 2 * half + 1] * by;
          const uint32_t rounded = pack_output(x, y, call.out.dtype);
          *reinterpret_cast<uint32_t*>(at + 8 * n) = rounded;
          if constexpr (kGated) {
            if (!call.out_rest.data) continue;
            const float2 kept = unpack_input(rounded, call.out.dtype);
            *reinterpret_cast<uint32_t*>(row_of(call.out_rest) + 8 * n) = pack_output(x - kept.x, y - kept.y, call.out.dtype);
          }
        }
        if (lane_id() % 4 == 0) call.lse.set(head.b, tile.first() + row, head.h, 0, kLn2 * (largest[half] + log2f(total)));
      }
    }
  }
};

template <int K, int V, bool kPath, bool kGated>
__global__ void __launch_bounds__(kAttendThreads, 1) attend(const __grid_constant__ Call call, int num_query_units) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Attend<K, V, kPath, kGated> attend{call, shared};
  const int num_tiles = *call.at.num_tiles;
  const unsigned num_items = static_cast<unsigned>(num_query_units) * num_tiles;
  if (threadIdx.x == 0) attend.init();
  __syncthreads();
  if (threadIdx.x < 128) {
    lower_registers<kCopyingRegisters>();
    if (threadIdx.x == 0) attend.copy(num_items, num_tiles);
    if (kGated && threadIdx.x / 32 == 1) attend.write_biases(num_items, num_tiles);
  } else {
    raise_registers<kComputingRegisters>();
    attend.compute(num_items, num_tiles);
  }
}

}  // namespace pathattn::cuda::hopper
