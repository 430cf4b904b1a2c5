// Gradients of the keys of every level and of the values, key-centric: a CTA owns a tile of keys, a consumer warpgroup 64 of them, and meets the
// query tiles of their nodes' later siblings, level by level. Rows are keys, columns are queries:
//   S^T = K q^T,  P^T = exp(S^T - lse),  dV += P^T dO,  dS^T = P^T (V dO^T - delta),  dK += dS^T q
// P^T and dS^T never leave registers: they are the A operands of the products that follow.
//
// Range. P is kept times 2^14 d_out_factor / largest, dS times query_factor / largest query factor / largest score factor; what is left is a factor
// of the CTA's results.
#pragma once

#include "kernels/cuda/hopper/far_gradient.cuh"
#include "kernels/cuda/hopper/fragments.cuh"

namespace pathattn::cuda::hopper {

template <int K, int V, bool kGate>
struct KeyGradients {
  static constexpr int kQueries = K == 64 && V == 64 ? 128 : 64;  // of a step
  static constexpr int kPanel = kQueries * 128;
  static constexpr int kQueryBytes = K / 64 * kPanel, kOutBytes = V / 64 * kPanel;
  static constexpr int kStages = kFarStages, kStepBytes = kQueryBytes + kOutBytes + 2 * kQueries * 4 + sizeof(Step);

  struct Shared {
    alignas(1024) unsigned char keys[2][kImageBytes<K>];
    unsigned char values[kImageBytes<V>];
    unsigned char queries[kStages][kQueryBytes];
    unsigned char d_out[kStages][kOutBytes];
    float vectors[kStages][2 * kQueries];  // row offsets, delta
    Step query_steps[kStages];
    float key_offsets[kGate ? kTile : 1];  // with a gate, of the query head at work
    Barriers<kStages> steps;
    Barriers<2> keys_ready;
    Barriers<1> values_ready;
  };
  static_assert(sizeof(Shared) <= kSharedBytes);
  struct Rings {
    Ring<kStages> steps;
    Ring<2> keys;
    Ring<1> values;
    __device__ explicit Rings(Shared& shared) : steps(shared.steps), keys(shared.keys_ready), values(shared.values_ready) {}
  };
  static __device__ void init(Shared& shared) {
    shared.steps.init();
    shared.keys_ready.init();
    shared.values_ready.init();
  }

  static __device__ void produce(const Call& call, const FarGradient& far, Shared& shared, Rings& rings, int slot, int unit) {
    const Tile tile = call.at.tiles[slot];
    const int64_t row = unit * call.max_tiles + slot;
    rings.values.fill(shared.values, call.at.values + row * kImageBytes<V>, kImageBytes<V>);
    for (int level = 0; level < call.num_levels; ++level) {
      const LaterTiles later(tile.index, tile.num_tiles, level, call.num_levels);
      if (later.first >= later.end) continue;
      rings.keys.fill(shared.keys[rings.keys.stage], call.at.keys[level] + row * kImageBytes<K>, kImageBytes<K>);
      for (int head = 0; head < call.group; ++head) {
        const int query_unit = unit * call.group + head, first_slot = slot - tile.index + later.first;
        int64_t query_row = query_unit * call.max_tiles + first_slot;
        int first_segment = far.first_segment[first_slot];
        for (int index = later.first; index < later.end; ++index, ++query_row) {
          const int segment = call.w.data ? segment_of(index, level, tile.index >> (2 * level)) : 0;
          const unsigned char* queries = segment_queries<K>(call, far, query_unit, query_row, first_segment, segment);
#pragma unroll 1
          for (int first = 0; first < kTile; first += kQueries) {
            Ring<kStages>& ring = rings.steps;
            ring.wait_empty();
            arrive_expecting(ring.full(), kStepBytes);
            copy_rows<K>(shared.queries[ring.stage], queries, first, kQueries, ring.full());
            copy_rows<V>(shared.d_out[ring.stage], far.d_out + query_row * kImageBytes<V>, first, kQueries, ring.full());
            copy_bulk(shared.vectors[ring.stage], far.row_offsets + query_row * kTile + first, kQueries * 4, ring.full());
            copy_bulk(shared.vectors[ring.stage] + kQueries, far.delta + query_row * kTile + first, kQueries * 4, ring.full());
            copy_bulk(&shared.query_steps[ring.stage], far.query_steps + query_row, sizeof(Step), ring.full());
            ring.advance();
          }
          first_segment += num_carries(index, call.num_levels);
        }
      }
    }
  }

  static __device__ void consume(const Call& call, const FarGradient& far, Shared& shared, Rings& rings, int slot, int unit) {
    const Tile tile = call.at.tiles[slot];
    const int group = threadIdx.x / 128 - 1, column = threadIdx.x % 4 * 2;
    const int64_t row = unit * call.max_tiles + slot;
    const float key_factor = call.at.key_factors[row], value_factor = call.at.value_factors[row];
    float dv[V / 2], dk[K / 2];
#pragma unroll
    for (float& x : dv) x = 0;
    const int64_t first_row = unit * call.group * call.max_tiles + slot;  // of the unit's first query unit
    if constexpr (kGate) {
      for (int i = 0; i < 2 * call.group; ++i) {
        if (column == 0) far.column_sums[(first_row + i / 2 * call.max_tiles) * kTile + consumer_row() + i % 2 * 8] = 0;
      }
    }
    const uint64_t values = descriptor(shared.values + group * (kPanelBytes / 2));
    rings.values.wait_full();
    for (int level = 0; level < call.num_levels; ++level) {
      const LaterTiles later(tile.index, tile.num_tiles, level, call.num_levels);
#pragma unroll
      for (float& x : dk) x = 0;
      hold(dk);
      if (later.first < later.end) {
        rings.keys.wait_full();
        const uint64_t keys = descriptor(shared.keys[rings.keys.stage] + group * (kPanelBytes / 2));
        const int steps_of_head = (later.end - later.first) * (kTile / kQueries);
        for (int head = 0; head < (kGate ? call.group : 1); ++head) {
          float sums[2] = {};
          const Step& key_step = far.key_steps[first_row + head * call.max_tiles];
          float* const key_offsets = shared.key_offsets + (kGate ? consumer_row() : 0);
          if constexpr (kGate) {  // a warp's rows are its own
            const float* offsets = call.at.gate_suffix + (first_row + head * call.max_tiles) * kTile + consumer_row();
            __syncwarp();
            if (column == 0) key_offsets[0] = offsets[0], key_offsets[8] = offsets[8];
            __syncwarp();
          }
          for (int steps = kGate ? steps_of_head : steps_of_head * call.group; steps > 0; --steps) {
            rings.steps.wait_full();
            const uint64_t queries = descriptor(shared.queries[rings.steps.stage], kPanel),
                           d_out = descriptor(shared.d_out[rings.steps.stage], kPanel);
            float s[kQueries / 2], dp[kQueries / 2];
            wgmma_fence();
            wgmma_first<0, 0>(s, keys, queries);
#pragma unroll
            for (int k = 16; k < K; k += 16) {
              wgmma<0, 0>(s, advance(keys, k / 64 * kPanelBytes + k % 64 * 2), advance(queries, k / 64 * kPanel + k % 64 * 2), true);
            }
            wgmma_commit();
            wgmma_first<0, 0>(dp, values, d_out);
#pragma unroll
            for (int k = 16; k < V; k += 16) {
              wgmma<0, 0>(dp, advance(values, k / 64 * kPanelBytes + k % 64 * 2), advance(d_out, k / 64 * kPanel + k % 64 * 2), true);
            }
            wgmma_commit();

            const Step& step = shared.query_steps[rings.steps.stage];
            const float* vectors = shared.vectors[rings.steps.stage] + column;
            const float score = step.score * key_factor;
            float shift[2] = {step.power, step.power};
            if constexpr (kGate) {
              const float between = (step.before - key_step.before) + (step.before_low - key_step.before_low);
              for (int i = 0; i < 2; ++i) shift[i] += between + key_offsets[8 * i];
            }
            float p[kQueries / 2];
            uint32_t a[kQueries / 16][4];
            wgmma_wait<1>();
            hold(s);
#pragma unroll
            for (int i = 0; i < kQueries / 2; i += 2) {
              const float2 offset = *reinterpret_cast<const float2*>(vectors + i / 4 * 8);
              p[i] = exp2_fast(fmaf(s[i], score, offset.x + shift[i / 2 % 2]));
              p[i + 1] = exp2_fast(fmaf(s[i + 1], score, offset.y + shift[i / 2 % 2]));
              a[i / 8][i / 2 % 4] = pack(p[i], p[i + 1]);
            }
            wgmma_wait<0>();
            hold(dp);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kQueries; k += 16) wgmma<1>(dv, a[k / 16], advance(d_out, k * 128), true);
            wgmma_commit();
            const float product = step.product * value_factor, minus_delta = -step.delta;
            uint32_t b[kQueries / 16][4];
#pragma unroll
            for (int i = 0; i < kQueries / 2; i += 2) {
              const float2 delta = *reinterpret_cast<const float2*>(vectors + kQueries + i / 4 * 8);
              const float x = p[i] * fmaf(dp[i], product, delta.x * minus_delta);
              const float y = p[i + 1] * fmaf(dp[i + 1], product, delta.y * minus_delta);
              b[i / 8][i / 2 % 4] = pack(x, y);
              if constexpr (kGate) sums[i / 2 % 2] = fmaf(x + y, step.sum, sums[i / 2 % 2]);
            }
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kQueries; k += 16) wgmma<1>(dk, b[k / 16], advance(queries, k * 128), true);
            wgmma_commit();
            wgmma_wait<0>();
            rings.steps.release();
          }
          if constexpr (kGate) add_column_sums(far.column_sums + (first_row + head * call.max_tiles) * kTile, sums);
        }
        hold(dk);
        rings.keys.release();
      }
      if (level == 0 || (tile.index >> (2 * level)) < ((tile.num_tiles - 1) >> (2 * level))) {
        write_rows<K>(far.d_keys[level] + row * kTile * K, dk, far.largest[unit].x * far.largest[unit].w * call.scale);
      }
    }
    hold(dv);
    write_rows<V>(far.d_values + row * kTile * V, dv, far.largest[unit].z * 0x1p-14f);
  }

  static __device__ void add_column_sums(float* column_sums, const float (&sums)[2]) {
    for (int i = 0; i < 2; ++i) {
      const float sum = row_sum(sums[i]);
      if (threadIdx.x % 4 == 0) column_sums[consumer_row() + 8 * i] += sum;
    }
  }
};

template <int K, int V, bool kGate>
__global__ void __launch_bounds__(kFarThreads, 1) key_gradients(const __grid_constant__ Call call, const __grid_constant__ FarGradient far) {
  work<KeyGradients<K, V, kGate>>(call, far, far.key_order, far.num_units);
}

template <int K, int V, bool kGate>
cudaError_t launch_key_gradients(const Call& call, const FarGradient& far, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename KeyGradients<K, V, kGate>::Shared);
  const auto kernel = key_gradients<K, V, kGate>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) return error;
  kernel<<<static_cast<unsigned>(call.max_tiles * far.num_units), kFarThreads, kBytes, stream>>>(call, far);
  return cudaGetLastError();
}

}  // namespace pathattn::cuda::hopper
