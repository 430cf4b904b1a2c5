// Gradients of the queries, query-centric: a CTA owns a tile of queries, a consumer warpgroup 64 of them, and goes through its segments left to
// right, from the farthest to the nearest, so that the gradient comes back through each G on its way:
//   dq <- dq G^T,  S = q K^T,  P = exp(S - lse),  dS = P (dO V^T - delta),  dq += dS K
// What dq is before it passes a G is written out: with the queries before it, it makes the gradient of G (matrix_gradients.cuh). q and dO stay in
// registers, and dS becomes the A operand of the product that follows.
//
// Range. dS is kept times key_factor / largest key factor / the tile's score factor; dq takes a power of two for the tile before each rounding.
#pragma once

#include "kernels/cuda/hopper/far_gradient.cuh"
#include "kernels/cuda/hopper/fragments.cuh"

namespace pathattn::cuda::hopper {

template <int K, int V, bool kGate>
struct QueryGradients {
  static constexpr int kKeys = K == 64 && V == 64 ? 128 : 64;  // of a step
  static constexpr int kPanel = kKeys * 128;
  static constexpr int kKeyBytes = K / 64 * kPanel, kValueBytes = V / 64 * kPanel, kOffsetBytes = kGate ? kKeys * 4 : 0;
  static constexpr int kStages = kFarStages, kStepBytes = kKeyBytes + kValueBytes + kOffsetBytes + sizeof(Step), kWidest = K > V ? K : V;

  struct Shared {
    alignas(1024) unsigned char rows[kImageBytes<kWidest>];  // dO, then the queries before each segment
    unsigned char matrix[kMatrixBytes<K>];
    unsigned char carried[kImageBytes<K>];  // on its way out
    unsigned char keys[kStages][kKeyBytes];
    unsigned char values[kStages][kValueBytes];
    float key_offsets[kStages][kKeys];
    Step key_steps[kStages];
    float maxima[2][kConsumerWarps];
    Barriers<kStages> steps;
    Barriers<1> rows_ready, matrix_ready;
  };
  static_assert(sizeof(Shared) <= kSharedBytes);
  struct Rings {
    Ring<kStages> steps;
    Ring<1> rows, matrix;
    int turn = 0;  // of `maxima`
    __device__ explicit Rings(Shared& shared) : steps(shared.steps), rows(shared.rows_ready), matrix(shared.matrix_ready) {}
  };
  static __device__ void init(Shared& shared) {
    shared.steps.init();
    shared.rows_ready.init();
    shared.matrix_ready.init();
  }

  // Calls visit(level, first, end, segment) for the tile's segments, left to right, with their key tiles.
  template <typename Visit>
  static __device__ void for_each_segment(const Call& call, const Tile& tile, Visit visit) {
    int segment = call.w.data ? num_segments(tile.index, call.num_levels) - 1 : 0;
    for (int level = call.num_levels - 1; level >= 0; --level) {
      const Siblings siblings(tile.index, level, call.num_levels);
      for (int first = siblings.first << (2 * level), end; first < (siblings.last + 1) << (2 * level); first = end) {
        end = call.w.data ? first + (1 << (2 * level)) : tile.index;
        visit(level, first, end, segment--);
      }
    }
  }

  static __device__ void produce(const Call& call, const FarGradient& far, Shared& shared, Rings& rings, int slot, int query_unit) {
    const Tile tile = call.at.tiles[slot];
    const int document = slot - tile.index, unit = query_unit / call.group;
    const int64_t row = query_unit * call.max_tiles + slot;
    const int first_segment = far.first_segment[slot];
    rings.rows.fill(shared.rows, far.d_out + row * kImageBytes<V>, kImageBytes<V>);
    for_each_segment(call, tile, [&](int level, int first_tile, int end, int segment) {
      if (first_tile > 0 && call.w.data) {
        const unsigned char* matrix = call.at.matrices[level] + matrix_slot(call, unit, document + first_tile, level) * kMatrixBytes<K>;
        rings.matrix.fill(shared.matrix, matrix, kMatrixBytes<K>);
      }
      rings.rows.fill(shared.rows, segment_queries<K>(call, far, query_unit, row, first_segment, segment), kImageBytes<K>);
      for (int index = first_tile; index < end; ++index) {
        const int64_t key_row = unit * call.max_tiles + document + index, gate_row = query_unit * call.max_tiles + document + index;
#pragma unroll 1
        for (int first = 0; first < kTile; first += kKeys) {
          Ring<kStages>& ring = rings.steps;
          ring.wait_empty();
          arrive_expecting(ring.full(), kStepBytes);
          copy_rows<K>(shared.keys[ring.stage], call.at.keys[level] + key_row * kImageBytes<K>, first, kKeys, ring.full());
          copy_rows<V>(shared.values[ring.stage], call.at.values + key_row * kImageBytes<V>, first, kKeys, ring.full());
          if constexpr (kGate) copy_bulk(shared.key_offsets[ring.stage], call.at.gate_suffix + gate_row * kTile + first, kKeys * 4, ring.full());
          copy_bulk(&shared.key_steps[ring.stage], far.key_steps + gate_row, sizeof(Step), ring.full());
          ring.advance();
        }
      }
    });
  }

  static __device__ float unit_of_dq(const Call& call, const FarGradient& far, float score_factor, int query_unit) {
    return far.largest[query_unit / call.group].y * score_factor * call.scale;
  }

  // The power of two that brings the tile's largest dq near float16's limit, and 1 for a tile of zeros.
  static __device__ float common_power(Shared& shared, Rings& rings, const float (&dq)[K / 2]) {
    float* maxima = shared.maxima[rings.turn ^= 1];
    float largest = 0;
#pragma unroll
    for (int i = 0; i < K / 2; ++i) largest = fmaxf(largest, fabsf(dq[i]));
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32 - 4] = largest;
    sync_threads(1 + kConsumers, kConsumers * 128);
    for (int warp = 0; warp < kConsumerWarps; ++warp) largest = fmaxf(largest, maxima[warp]);
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);  // biased
    if (exponent == 0 || exponent == 255) return 1;
    return __uint_as_float(static_cast<uint32_t>(min(127 + 14 + 126 - exponent, 250)) << 23);
  }

  static __device__ void consume(const Call& call, const FarGradient& far, Shared& shared, Rings& rings, int slot, int query_unit) {
    const Tile tile = call.at.tiles[slot];
    const int column = threadIdx.x % 4 * 2;
    const int64_t row = query_unit * call.max_tiles + slot;
    const int64_t segments = query_unit * far.max_segments + far.first_segment[slot];
    const float score_factor = fmaxf(far.score_factors[row], 0x1p-100f);
    const float of_score = call.scale * kLog2E * call.at.query_factors[row], of_product = far.d_out_factors[row] / score_factor;
    const float* offsets = far.row_offsets + row * kTile + consumer_row();
    const float* deltas = far.delta + row * kTile + consumer_row();
    const float minus_delta[2] = {-deltas[0] / score_factor, -deltas[8] / score_factor};
    float offset[2] = {offsets[0], offsets[8]};
    float2 before = {};
    if constexpr (kGate) before = {far.query_steps[row].before, far.query_steps[row].before_low};
    float sums[2] = {};
    float dq[K / 2];
#pragma unroll
    for (float& x : dq) x = 0;
    uint32_t q[K / 16][4], d_out[V / 16][4];
    rings.rows.wait_full();
    load_rows_as_a<V>(d_out, shared.rows);
    __syncwarp();
    rings.rows.release();
    for_each_segment(call, tile, [&](int, int first_tile, int end, int segment) {
      if (first_tile > 0 && call.w.data) {
        const float power = common_power(shared, rings, dq), back = 1 / power;
        round_rows<K>(q, dq, power);
        write_image<K>(far.d_segments + (segments + segment) * kImageBytes<K>, shared.carried, q);
        if (threadIdx.x == 128) far.d_segment_factors[segments + segment] = back * unit_of_dq(call, far, score_factor, query_unit);
        rings.matrix.wait_full();
        const uint64_t columns = descriptor(shared.matrix);
        wgmma_fence();
        wgmma_first<0>(dq, q[0], columns);
#pragma unroll
        for (int k = 16; k < K; k += 16) wgmma<0>(dq, q[k / 16], advance(columns, k / 64 * (K * 128) + k % 64 * 2), true);
        wgmma_commit();
        wgmma_wait<0>();
        hold(dq);
        rings.matrix.release();
#pragma unroll
        for (float& x : dq) x *= back;
        hold(dq);
      }
      rings.rows.wait_full();
      load_rows_as_a<K>(q, shared.rows);
      __syncwarp();
      rings.rows.release();
      for (int steps = (end - first_tile) * (kTile / kKeys); steps > 0; --steps) {
        rings.steps.wait_full();
        const uint64_t keys = descriptor(shared.keys[rings.steps.stage], kPanel), values = descriptor(shared.values[rings.steps.stage], kPanel);
        float s[kKeys / 2], dp[kKeys / 2];
        wgmma_fence();
        wgmma_first<0>(s, q[0], keys);
#pragma unroll
        for (int k = 16; k < K; k += 16) wgmma<0>(s, q[k / 16], advance(keys, k / 64 * kPanel + k % 64 * 2), true);
        wgmma_commit();
        wgmma_first<0>(dp, d_out[0], values);
#pragma unroll
        for (int k = 16; k < V; k += 16) wgmma<0>(dp, d_out[k / 16], advance(values, k / 64 * kPanel + k % 64 * 2), true);
        wgmma_commit();

        const Step step = shared.key_steps[rings.steps.stage];
        const float score = step.score * of_score, product = step.product * of_product;
        float shift[2] = {offset[0], offset[1]};
        if constexpr (kGate) {
          for (int i = 0; i < 2; ++i) shift[i] += (before.x - step.before) + (before.y - step.before_low);
        }
        float p[kKeys / 2];
        wgmma_wait<1>();
        hold(s);
#pragma unroll
        for (int i = 0; i < kKeys / 2; i += 2) {
          float2 key_offset = {};
          if constexpr (kGate) key_offset = *reinterpret_cast<const float2*>(shared.key_offsets[rings.steps.stage] + i / 4 * 8 + column);
          p[i] = exp2_fast(fmaf(s[i], score, shift[i / 2 % 2] + key_offset.x));
          p[i + 1] = exp2_fast(fmaf(s[i + 1], score, shift[i / 2 % 2] + key_offset.y));
        }
        wgmma_wait<0>();
        hold(dp);
        uint32_t ds[kKeys / 16][4];
#pragma unroll
        for (int i = 0; i < kKeys / 2; i += 2) {
          const float x = p[i] * fmaf(dp[i], product, step.delta * minus_delta[i / 2 % 2]);
          const float y = p[i + 1] * fmaf(dp[i + 1], product, step.delta * minus_delta[i / 2 % 2]);
          ds[i / 8][i / 2 % 4] = pack(x, y);
          if constexpr (kGate) sums[i / 2 % 2] = fmaf(x + y, step.sum * score_factor, sums[i / 2 % 2]);
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16) wgmma<1>(dq, ds[k / 16], advance(keys, k * 128), true);
        wgmma_commit();
        wgmma_wait<0>();
        rings.steps.release();
      }
      hold(dq);
    });
    write_rows<K>(far.d_queries + row * kTile * K, dq, unit_of_dq(call, far, score_factor, query_unit));
    if constexpr (kGate) {
      for (int i = 0; i < 2; ++i) {
        const float sum = row_sum(sums[i]);
        if (column == 0) far.row_sums[row * kTile + consumer_row() + 8 * i] = sum;
      }
    }
    if (threadIdx.x % 128 == 0) wait_bulk_read();
  }
};

template <int K, int V, bool kGate>
__global__ void __launch_bounds__(kFarThreads, 1) query_gradients(const __grid_constant__ Call call, const __grid_constant__ FarGradient far) {
  work<QueryGradients<K, V, kGate>>(call, far, far.query_order, far.num_units * call.group);
}

template <int K, int V, bool kGate>
cudaError_t launch_query_gradients(const Call& call, const FarGradient& far, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename QueryGradients<K, V, kGate>::Shared);
  const auto kernel = query_gradients<K, V, kGate>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) return error;
  kernel<<<static_cast<unsigned>(call.max_tiles * far.num_units * call.group), kFarThreads, kBytes, stream>>>(call, far);
  return cudaGetLastError();
}

}  // namespace pathattn::cuda::hopper
