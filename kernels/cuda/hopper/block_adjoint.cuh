// Backward's last stage, a block of 64 tokens and a key head at a time: from the gradients of what the block's UT transform made (queries carried to
// the block's start, keys carried to its end, G) and from attention inside the block, the gradients of q, k, v, w, beta.
//
// With L = tril(W K^T, -1), U = (I + N)^-1 B W, X = (I + N)^-1 B L, scores A = tril(Q K^T - tril(Q W^T) X), dA their gradient:
//   dQW = -tril(dQ U^T + dA X^T)                            dq = dQ + dA K + dQW W
//   dU  = -tril(Q W^T)^T dQ - W dG                          dX = -tril(Q W^T)^T dA - W dK^T
//   R_W = (I + N)^-T dU,  R_X = tril((I + N)^-T dX, -1)     dN = -tril(R_W U^T + R_X X^T, -1)
//   M   = R_W + R_X K + dN W                                dbeta = rowsum(M * W)
//   dw  = B M + dN^T B W - U dG^T - X dK + dQW^T Q          dk = dK + dA^T Q + R_X^T B W
// Nothing is divided by beta or by G. Products by wgmma on float16 operands, each with a power of two; sums in float32 and in true units.
//
// Warpgroup j has columns 64 j ... of results as wide as keys or values; of 64 x 64 results the first warpgroup takes some, the last others. At width
// 64 three CTAs share a multiprocessor and fill each other's waits; at 128 two would have to spill more than they gain.
#pragma once

#include "kernels/cuda/hopper/local.cuh"
#include "kernels/cuda/hopper/local_gradients.cuh"
#include "kernels/cuda/hopper/pair_adjoint.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"

namespace pathattn::cuda::hopper {

// Shared memory, in 64 x 64 blocks of 8 KB. A: V, then Q, dK or dG, R_W. B: d_o, then dQ, dG. C: Q W^T. D: P, then dQW, dX, R_X. E: dA.
template <int K, int V>
struct BlockMemory {
  static constexpr int kKeyPanels = K / 64, kValuePanels = V / 64, kPanels = K > V ? kKeyPanels : kValuePanels;
  static constexpr int kThreads = 128 * kPanels, kCtas = kPanels == 1 ? 3 : 1;  // of a multiprocessor
  static constexpr int kU = 2 * kKeyPanels, kA = kU + kKeyPanels, kB = kA + kPanels, kC = kB + kPanels, kD = kC + 1, kE = kD + 1, kX = kE + 1,
                       kBlocks = kX + 1;
  static constexpr int kY = kB;                           // both terms, next to each other: B and C, or B
  static constexpr int kMatrix = kPanels == 1 ? kB : kA;  // dG: panels of K rows
  static constexpr int kRowSums = kE * kBlockBytes;       // of dbeta, in the end
  static constexpr int kBeta = kBlocks * kBlockBytes, kPowers = kBeta + kBlock * 4, kMaxima = kPowers + kBlock * 4, kBarrier = kMaxima + 2 * 8 * 4,
                       kTotal = kBarrier + 8;
};

// A CTA's work on one block.
template <int K, int V, bool kPath, bool kGate>
struct BlockAdjoint {
  using Memory = BlockMemory<K, V>;
  static constexpr int kKeyPanels = Memory::kKeyPanels, kValuePanels = Memory::kValuePanels, kPanels = Memory::kPanels;
  const Call& call;
  const LocalGradients& gradients;
  unsigned char* shared;
  Tile tile;
  Unit unit;
  int index;  // of the tile among the batch row's
  int half;   // of the tile
  int j;      // warpgroup
  int count;  // tokens
  BlockInputs has;
  float key_factor, u_factor, x_factor, value_factor;  // number = factor * stored
  struct HeadFactors {
    float query, d_out, score;
  };
  HeadFactors head_factors;  // of the head at work, at first the first
  int turn = 0;
  uint32_t parity = 0;
  float query_factor = 1, da_factor = 1, dquery_factor = 1;  // of the head at work
  float rx_factor = 1;

  __device__ bool is_first() const { return kPanels == 1 || j == 0; }
  __device__ bool is_last() const { return kPanels == 1 || j == kPanels - 1; }
  __device__ bool in_keys() const { return kKeyPanels == kPanels || j < kKeyPanels; }
  __device__ bool in_values() const { return kValuePanels == kPanels || j < kValuePanels; }
  __device__ int64_t first_token() const { return tile.first() + half * kBlock; }
  __device__ int64_t tile_slot() const { return slot(call, unit.local, index); }

  __device__ unsigned char* at(int block) const { return shared + block * kBlockBytes; }
  __device__ unsigned char* w(int panel) const { return at(2 * panel); }  // w and keys are the halves of an image of 128 rows
  __device__ unsigned char* keys(int panel) const { return at(2 * panel + 1); }
  __device__ unsigned char* u(int panel) const { return at(Memory::kU + panel); }
  __device__ unsigned char* a(int panel) const { return at(Memory::kA + panel); }
  __device__ unsigned char* b(int panel) const { return at(Memory::kB + panel); }
  __device__ unsigned char* c() const { return at(Memory::kC); }
  __device__ unsigned char* d() const { return at(Memory::kD); }
  __device__ unsigned char* da() const { return at(Memory::kE); }
  __device__ unsigned char* x() const { return at(Memory::kX); }
  __device__ unsigned char* y(int term) const { return at(Memory::kY + term); }
  __device__ unsigned char* matrix(int row, int panel) const { return at(Memory::kMatrix + panel * kKeyPanels + row); }
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }
  __device__ uint64_t* barrier() const { return reinterpret_cast<uint64_t*>(shared + Memory::kBarrier); }

  enum Sum { kDk, kDw, kDu, kDx };
  // Sums of scratch are in wgmma's order, four numbers a thread at a time.
  __device__ float4* sum_of(Sum sum) const {
    const int64_t block = 2 * tile_slot() + half;
    return reinterpret_cast<float4*>(gradients.sums) + ((4 * block + sum) * kPanels + j) * (kBlock * kBlock / 4) + threadIdx.x % 128;
  }
  __device__ void write_sum(const float (&d)[32], Sum sum) const {
    float4* const to = sum_of(sum);
#pragma unroll
    for (int e = 0; e < 32; e += 4) __stcg(to + e * 32, make_float4(d[e], d[e + 1], d[e + 2], d[e + 3]));
  }
  __device__ void add_sum(float (&d)[32], Sum sum) const {
    const float4* const from = sum_of(sum);
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      const float4 x = __ldcg(from + e * 32);
      d[e] += x.x, d[e + 1] += x.y, d[e + 2] += x.z, d[e + 3] += x.w;
    }
  }

  // What was written to shared memory is seen by wgmma and bulk copies of all.
  __device__ void settle() const {
    fence_async();
    __syncthreads();
  }
  // The power of two for the largest of all; also a barrier.
  __device__ float factor_of(float largest) {
    float* const maxima = floats(Memory::kMaxima) + 8 * (turn ^= 1);
    largest = warp_max(largest);
    if (lane_id() == 0) maxima[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i) largest = fmaxf(largest, maxima[i]);
    return gradient_factor(largest);
  }
  template <bool kDiagonal>
  __device__ static void keep_lower(float (&d)[32]) {
    for_pairs(d, [&](int r, int c, float& x, float& y) {
      if (c >= r + kDiagonal) x = 0;
      if (c + 1 >= r + kDiagonal) y = 0;
    });
  }
  __device__ static void store(unsigned char* block, const float (&d)[32], float by) { store_block(block, 0, d, by); }
  // d = A B, A^T B or A B^T, over kBlocks blocks of k: a(i), b(i).
  template <int kTransposeA, int kTransposeB, int kBlocks, typename A, typename B>
  __device__ static void set_product(float (&d)[32], A a, B b) {
    wgmma_fence();
    multiply_first<kTransposeA, kTransposeB>(d, a(0), b(0));
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) multiply<kTransposeA, kTransposeB>(d, a(i), b(i));
    wgmma_commit();
    wgmma_wait<0>();
    hold(d);
  }
  __device__ static void set(float (&d)[32], const unsigned char* a, const unsigned char* b) {
    set_product<0, 1, 1>(
        d, [&](int) { return a; }, [&](int) { return b; });
  }
  __device__ static void set_transposed(float (&d)[32], const unsigned char* a, const unsigned char* b) {
    set_product<1, 1, 1>(
        d, [&](int) { return a; }, [&](int) { return b; });
  }
  __device__ static void set_by_transposed(float (&d)[32], const unsigned char* a, const unsigned char* b) {
    set_product<0, 0, 1>(
        d, [&](int) { return a; }, [&](int) { return b; });
  }
  // d = ((I + N)^-1)^T B
  __device__ void set_y_transposed(float (&d)[32], const unsigned char* b) const {
    set_product<1, 1, 2>(
        d, [&](int i) { return y(1 - i); }, [&](int) { return b; });
  }
  // total += factor * what `product` sets.
  template <typename Product>
  __device__ static void add_times(float (&total)[32], float factor, Product product) {
    float p[32];
    product(p);
    add_scaled(total, factor, p);
  }
  // d *= beta of its row times `by`
  __device__ void scale_rows(float (&d)[32], float by) const {
    const float* beta = floats(Memory::kBeta) + own_row();
    const float of_row[2] = {beta[0] * by, beta[8] * by};
#pragma unroll
    for (int e = 0; e < 32; ++e) d[e] *= of_row[e / 2 % 2];
  }
  __device__ float largest_of_keys(const float (&d)[32]) const { return in_keys() ? largest_of(d) : 0.f; }

  // A warp's 16 rows of a panel of a 16-bit input.
  __device__ void load_panel(InputRows<64>& rows, Tensor tensor, const Unit& head, int panel) const {
    tensor.data = static_cast<uint16_t*>(tensor.data) + 64 * panel;
    rows.load(tensor, head.b, first_token(), head.h, threadIdx.x / 32 % 4 * 16, count);
  }
  __device__ void store_panel(const InputRows<64>& rows, DType dtype, unsigned char* block, float factor) const {
    rows.store(block, threadIdx.x / 32 % 4 * 16, dtype, reciprocal_of_power(factor));
  }
  // This block's part of gradients in float32, a warpgroup's columns; zero where there is none.
  __device__ void load_float32(float (&d)[32], const float* tile_rows, int width, bool is_there) const {
    const float* const from = moved(tile_rows, (half * kBlock + own_row()) * width + kBlock * j + fragment_column());
#pragma unroll
    for (int e = 0; e < 32; e += 2) {
      float2 pair = {0, 0};
      if (is_there && own_row() + e / 2 % 2 * 8 < count) pair = *reinterpret_cast<const float2*>(from + e / 2 % 2 * 8 * width + e / 4 * 8);
      d[e] = pair.x, d[e + 1] = pair.y;
    }
  }
  __device__ void keep_float32(const float (&d)[32], float* tile_rows, int width) const {
    float* const to = moved(tile_rows, (half * kBlock + own_row()) * width + kBlock * j + fragment_column());
#pragma unroll
    for (int e = 0; e < 32; e += 2) __stcg(reinterpret_cast<float2*>(to + e / 2 % 2 * 8 * width + e / 4 * 8), make_float2(d[e], d[e + 1]));
  }
  template <bool kFloat32>
  __device__ void write(const Tensor& tensor, const Unit& head, const float (&d)[32]) const {
    write_block<kFloat32>(tensor, head.b * tensor.batch_stride + first_token() * tensor.token_stride + head.h * tensor.head_stride + kBlock * j, d,
                          count);
  }

  __device__ void await() {
    wait(barrier(), parity);
    parity ^= 1;
  }
  // d_o of a query head; with the first, W, U and X as `local` made them.
  __device__ void fetch_images(int member, int64_t at_query) const {
    if (threadIdx.x != 0) return;
    const auto fetch_panels = [&](const unsigned char* image, int num_panels, auto to) {
      for (int p = 0; p < num_panels; ++p) copy_bulk(to(p), image + p * kPanelBytes + half * kBlockBytes, kBlockBytes, barrier());
    };
    const bool with_transform = kPath && member == 0;
    arrive_expecting(barrier(), kValuePanels * kBlockBytes + (with_transform ? (2 * kKeyPanels + 1) * kBlockBytes + 2 * kBlock * 4 : 0));
    if (with_transform) {
      const int64_t slot = tile_slot();
      const float* rows = call.at.transform_rows + 2 * slot * kTile + half * kBlock;
      fetch_panels(call.at.transform_w + slot * kImageBytes<K>, kKeyPanels, [&](int p) { return w(p); });
      fetch_panels(call.at.transform_u + slot * kImageBytes<K>, kKeyPanels, [&](int p) { return u(p); });
      copy_bulk(x(), call.at.transform_x + (2 * slot + half) * kBlockBytes, kBlockBytes, barrier());
      copy_bulk(floats(Memory::kBeta), rows, kBlock * 4, barrier());
      copy_bulk(floats(Memory::kPowers), rows + kTile, kBlock * 4, barrier());
    }
    fetch_panels(gradients.d_out + at_query * kImageBytes<V>, kValuePanels, [&](int p) { return b(p); });
  }

  // To the second-level cache: what comes from global memory later.
  __device__ void prefetch(int member) const {
    const int64_t at_query = slot(call, unit.local * call.group + member, index);
    if (has.dqueries) prefetch_bulk(gradients.dqueries + (at_query * kTile + half * kBlock) * K, kBlock * K * 4);
    if (member > 0) return;
    const int64_t block = 2 * tile_slot() + half;
    if (has.dkeys) {
      prefetch_bulk(gradients.dvalues + (tile_slot() * kTile + half * kBlock) * V, kBlock * V * 4);
      prefetch_bulk(gradients.dkeys + (tile_slot() * kTile + half * kBlock) * K, kBlock * K * 4);
    }
    if constexpr (!kPath) return;
    if (has.dmatrix) prefetch_bulk(gradients.dmatrices + block * K * K, K * K * 4);
    prefetch_bulk(call.at.transform_y + block * (2 * kBlockBytes), 2 * kBlockBytes);
  }

  // Weights from raw scores.
  __device__ __forceinline__ void weigh(float (&s)[32], const float (&lse)[2], int64_t gate_slot, float score_factor) const {
    const int row = own_row();
    scale(s, score_factor);
    if constexpr (kGate) {
      const float2* prefix = call.at.gate_prefix + gate_slot + half * kBlock;
      const float2 of_row[2] = {prefix[row], prefix[row + 8]};
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        const float2 of_column = prefix[fragment_column() + e / 4 * 8 + e % 2], r = of_row[e / 2 % 2];
        s[e] += (r.x - of_column.x) + (r.y - of_column.y);
      }
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int i = e / 2 % 2, last = row + 8 * i < count ? row + 8 * i : -1;
      s[e] = fragment_column() + e / 4 * 8 + e % 2 <= last ? exp2_fast(s[e] - lse[i]) : 0.f;
    }
  }

  // Adds sums of dS over rows less over columns to what the tile's other block made of them. One warpgroup; D is free.
  __device__ __forceinline__ void add_gate_sums(const float (&ds)[32], float* sums) const {
    float rows[2] = {0, 0};
    float *const columns = reinterpret_cast<float*>(d()), *const of_rows = columns + 4 * kBlock;
#pragma unroll
    for (int e = 0; e < 32; e += 2) rows[e / 2 % 2] += ds[e] + ds[e + 1];
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      float x = ds[e] + ds[e + 2], y = ds[e + 1] + ds[e + 3];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, step);
        y += __shfl_xor_sync(0xffffffffu, y, step);
      }
      if (lane_id() < 4) *reinterpret_cast<float2*>(columns + threadIdx.x / 32 % 4 * kBlock + 2 * e + fragment_column()) = make_float2(x, y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = row_sum(rows[i]);
      if (lane_id() % 4 == 0) of_rows[own_row() + 8 * i] = sum;
    }
    sync_threads(1, 128);
    const int r = threadIdx.x % 128;
    if (r < kBlock) {
      float sum = of_rows[r];
      for (int part = 0; part < 4; ++part) sum -= columns[part * kBlock + r];
      sums[half * kBlock + r] += sum;
    }
    sync_threads(1, 128);
  }

  __device__ static HeadFactors factors_of_head(const Call& call, const LocalGradients& gradients, int64_t at_query) {
    return {fabsf(call.at.query_factors[at_query]), gradients.d_out_factors[at_query], gradients.score_factors[at_query]};
  }
  // One query head: dq, dv, and its part of every sum: in registers after the last, in gradients.sums before.
  __device__ __forceinline__ void add_head(int member, float (&dk)[32], float (&dw)[32]) {
    const int64_t query = unit.local * call.group + member, at_query = slot(call, query, index);
    const Unit head = query_unit(call, query);
    if (member > 0) head_factors = factors_of_head(call, gradients, at_query);
    const float d_out_factor = head_factors.d_out, ds_factor = head_factors.score;
    query_factor = head_factors.query;
    da_factor = call.scale * ds_factor;
    fetch_images(member, at_query);
    if (threadIdx.x == 0) prefetch(member);
    InputRows<64> rows, values, of_keys;
    if (in_values()) load_panel(values, call.v, unit, j);
    if (member == 0 && in_keys()) load_panel(of_keys, call.k, unit, j);
    if (in_keys()) load_panel(rows, call.q, head, j);
    float lse[2] = {0, 0}, delta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own_row() + 8 * i;
      if (row < count) lse[i] = kLog2E * call.lse.at(head.b, first_token() + row, head.h);
      delta[i] = gradients.delta[at_query * kTile + half * kBlock + row];
    }
    if (in_values()) store_panel(values, call.v.dtype, a(j), value_factor);
    if (member == 0 && in_keys()) store_panel(of_keys, call.k.dtype, keys(j), key_factor);
    settle();
    await();
    float p[32], ds[32], dq[32];
    if (is_last()) {
      set_product<0, 0, kValuePanels>(
          ds, [&](int panel) { return b(panel); }, [&](int panel) { return a(panel); });
    }
    __syncthreads();
    if (in_keys()) store_panel(rows, call.q.dtype, a(j), query_factor);
    settle();
    if constexpr (kPath) {
      if (is_first()) {
        set_product<0, 0, kKeyPanels>(
            p, [&](int panel) { return a(panel); }, [&](int panel) { return w(panel); });
        keep_lower<true>(p);
        store(c(), p, 1.f);
      }
      settle();
    }
    if (is_last()) {
      set_product<0, 0, kKeyPanels>(
          p, [&](int panel) { return a(panel); }, [&](int panel) { return keys(panel); });
      if constexpr (kPath) add_times(p, -x_factor * reciprocal_of_power(key_factor), [&](float(&t)[32]) { set(t, c(), x()); });
      weigh(p, lse, at_query * kTile, kLog2E * call.scale * query_factor * key_factor);
      const float by = d_out_factor * value_factor;
#pragma unroll
      for (int e = 0; e < 32; ++e) ds[e] = p[e] == 0.f ? 0.f : p[e] * (by * ds[e] - delta[e / 2 % 2]);
      if constexpr (kGate) add_gate_sums(ds, gradients.gate_sums + at_query * kTile);
      store(d(), p, 1.f);
      store(da(), ds, reciprocal_of_power(ds_factor));
    }
    load_float32(dq, gradients.dqueries + at_query * kTile * K, K, in_keys() && has.dqueries);
    settle();
    if (in_values()) {
      float* const partial = gradients.dvalues + tile_slot() * kTile * V;
      float far[32];
      load_float32(far, partial, V, has.dkeys || member > 0);
      set_transposed(p, d(), b(j));
#pragma unroll
      for (int e = 0; e < 32; ++e) p[e] = fmaf(p[e], d_out_factor, far[e]);
      if (member + 1 == call.group)
        write<false>(gradients.dv, unit, p);
      else
        for_pairs(p, [&](int r, int c, float x, float y) {
          __stcg(reinterpret_cast<float2*>(partial + (half * kBlock + r) * V + kBlock * j + c), make_float2(x, y));
        });
    }
    dquery_factor = factor_of(largest_of_keys(dq));  // all are done with P and d_o
    if (in_keys()) store(b(j), dq, reciprocal_of_power(dquery_factor));
    settle();

    float dqw_factor = 1;
    if constexpr (kPath) {
      if (is_first()) {
        set_product<0, 0, kKeyPanels>(
            p, [&](int panel) { return b(panel); }, [&](int panel) { return u(panel); });
        scale(p, -dquery_factor * u_factor);
        add_times(p, -da_factor * x_factor, [&](float(&t)[32]) { set_by_transposed(t, da(), x()); });
        keep_lower<true>(p);
      }
      dqw_factor = factor_of(is_first() ? largest_of(p) : 0.f);
      if (is_first()) store(d(), p, reciprocal_of_power(dqw_factor));
      settle();
    }
    if (in_keys()) {
      add_times(dq, da_factor * key_factor, [&](float(&t)[32]) { set(t, da(), keys(j)); });
      if constexpr (kPath) add_times(dq, dqw_factor, [&](float(&t)[32]) { set(t, d(), w(j)); });
      write<false>(gradients.dq, head, dq);
      set_transposed(dk, da(), a(j));
      scale(dk, da_factor * query_factor);
      if constexpr (kPath) {
        set_transposed(dw, d(), a(j));
        scale(dw, dqw_factor * query_factor);
      }
    }
    const bool is_more = member + 1 < call.group;
    const auto accumulate_sum = [&](float(&d)[32], Sum sum) {
      if (member > 0) add_sum(d, sum);
      if (is_more) write_sum(d, sum);
    };
    if (in_keys()) accumulate_sum(dk, kDk);
    if constexpr (kPath) {
      if (in_keys()) accumulate_sum(dw, kDw);
      if (is_more && is_last()) {
        set_dx(p);
        accumulate_sum(p, kDx);
      }
      if (is_more && in_keys()) {
        set_du(p);
        accumulate_sum(p, kDu);
      }
    }
    if (is_more) __syncthreads();
  }
  // -(Q W^T)^T dA and -(Q W^T)^T dQ of the head at work.
  __device__ __forceinline__ void set_dx(float (&dx)[32]) const {
    set_transposed(dx, c(), da());
    scale(dx, -query_factor * da_factor);
  }
  __device__ __forceinline__ void set_du(float (&du)[32]) const {
    set_transposed(du, c(), b(j));
    scale(du, -query_factor * dquery_factor);
  }

  // From the sums over heads: R_W, R_X, dN and what follows from them: dk, dw, dbeta.
  __device__ __forceinline__ void finish(float (&dk)[32], float (&dw)[32]) {
    float dkey_factor = 1;
    if (has.dkeys) {
      float t[32];
      load_float32(t, gradients.dkeys + tile_slot() * kTile * K, K, in_keys());
      add_scaled(dk, 1.f, t);
      if constexpr (kPath) {
        dkey_factor = factor_of(largest_of_keys(t));  // all are done with Q
        if (in_keys()) store(a(j), t, reciprocal_of_power(dkey_factor));
        settle();
        if (in_keys()) add_times(dw, -dkey_factor * x_factor, [&](float(&d)[32]) { set(d, x(), a(j)); });
      }
    }
    if constexpr (kPath) {
      float* const rows = gradients.dkeys + tile_slot() * kTile * K;  // read: now dk waits there, not in registers
      if (in_keys()) keep_float32(dk, rows, K);
      differentiate_transform(dw, dkey_factor);
      load_float32(dk, rows, K, in_keys());
      if (in_keys()) add_times(dk, -rx_factor * u_factor, [&](float(&p)[32]) { set_transposed(p, d(), w(j)); });
    }
    if (in_keys()) write<false>(gradients.dk, unit, dk);
  }

  __device__ __forceinline__ void differentiate_transform(float (&dw)[32], float dkey_factor) {
    float dx_factor = 1;
    {
      float dx[32];
      if (is_last()) {
        set_dx(dx);
        if (call.group > 1) add_sum(dx, kDx);
        if (has.dkeys) {
          add_times(dx, -dkey_factor, [&](float(&d)[32]) {
            set_product<0, 0, kKeyPanels>(
                d, [&](int panel) { return w(panel); }, [&](int panel) { return a(panel); });
          });
        }
      }
      dx_factor = factor_of(is_last() ? largest_of(dx) : 0.f);  // all are done with dK and dQW
      if (is_last()) store(d(), dx, reciprocal_of_power(dx_factor));
    }
    float du[32], t[32];
    zero(du);
    if (in_keys()) {
      set_du(du);
      if (call.group > 1) add_sum(du, kDu);
    }
    if (has.dmatrix) {
      const float* from = gradients.dmatrices + (2 * tile_slot() + half) * K * K;
      float largest = 0;
      for (int row = 0; in_keys() && row < kKeyPanels; ++row) {
        zero(t);
        add_block(t, from, row, j, K, K);
        largest = fmaxf(largest, largest_of(t));
      }
      const float factor = factor_of(largest);  // all are done with dQ and Q W^T
      for (int row = 0; in_keys() && row < kKeyPanels; ++row) {
        zero(t);
        add_block(t, from, row, j, K, K);
        store(matrix(row, j), t, reciprocal_of_power(factor));
      }
      settle();
      if (in_keys()) {
        add_times(du, -factor, [&](float(&d)[32]) {
          set_product<0, 1, kKeyPanels>(
              d, [&](int panel) { return w(panel); }, [&](int k) { return matrix(k, j); });
        });
        add_times(dw, -factor * u_factor, [&](float(&d)[32]) {
          set_product<0, 0, kKeyPanels>(
              d, [&](int panel) { return u(panel); }, [&](int k) { return matrix(j, k); });
        });
      }
    }
    const float du_factor = factor_of(largest_of_keys(du));  // all are done with dG, dQ and Q W^T
    if (in_keys()) store(a(j), du, reciprocal_of_power(du_factor));
    settle();
    if (threadIdx.x == 0) {
      arrive_expecting(barrier(), 2 * kBlockBytes);
      copy_bulk(y(0), call.at.transform_y + (2 * tile_slot() + half) * (2 * kBlockBytes), 2 * kBlockBytes, barrier());
    }
    await();

    const auto solve = [&](unsigned char* image, float factor, bool strictly_lower) {
      set_y_transposed(t, image);
      scale(t, factor);
      if (strictly_lower) keep_lower<false>(t);
    };
    if (in_keys()) solve(a(j), du_factor, false);
    const float rw_factor = factor_of(largest_of_keys(t));
    if (in_keys()) store(a(j), t, reciprocal_of_power(rw_factor));
    if (is_last()) solve(d(), dx_factor, true);
    rx_factor = factor_of(is_last() ? largest_of(t) : 0.f);
    if (is_last()) store(d(), t, reciprocal_of_power(rx_factor));
    settle();
    if (is_first()) {
      set_product<0, 0, kKeyPanels>(
          t, [&](int panel) { return a(panel); }, [&](int panel) { return u(panel); });
      scale(t, -rw_factor * u_factor);
      add_times(t, -rx_factor * x_factor, [&](float(&p)[32]) { set_by_transposed(p, d(), x()); });
      keep_lower<false>(t);
    }
    const float dn_factor = factor_of(is_first() ? largest_of(t) : 0.f);  // all are done with X
    if (is_first()) store(x(), t, reciprocal_of_power(dn_factor));
    settle();
    float m[32];
    if (in_keys()) {
      load_block(m, a(j), 0, rw_factor);
      add_times(m, rx_factor * key_factor, [&](float(&p)[32]) { set(p, d(), keys(j)); });
      add_times(m, dn_factor, [&](float(&p)[32]) { set(p, x(), w(j)); });
    }
    __syncthreads();
    if (in_keys()) sum_dbeta_and_scale_w(m);
    settle();
    if (static_cast<int>(threadIdx.x) < count) {
      const float *sums = floats(Memory::kRowSums) + threadIdx.x, power = floats(Memory::kPowers)[threadIdx.x];
      gradients.dbeta.set(unit.b, first_token() + threadIdx.x, unit.h, 0, (kKeyPanels == 2 ? sums[0] + sums[kBlock] : sums[0]) * power * power);
    }
    if (!in_keys()) return;
    scale_rows(m, 1.f);
    add_scaled(dw, 1.f, m);
    add_times(dw, -dn_factor * u_factor, [&](float(&p)[32]) { set_transposed(p, x(), w(j)); });
    const float* powers = floats(Memory::kPowers) + own_row();
    const float by[2] = {reciprocal_of_power(powers[0]), reciprocal_of_power(powers[8])};
#pragma unroll
    for (int e = 0; e < 32; ++e) dw[e] *= by[e / 2 % 2];
    write<true>(gradients.dw, unit, dw);
  }

  // This warpgroup's part of dbeta = rowsum(M * W); then its W becomes B W / -u_factor.
  __device__ __forceinline__ void sum_dbeta_and_scale_w(const float (&m)[32]) const {
    const float* beta = floats(Memory::kBeta) + own_row();
    const float by = reciprocal_of_power(-u_factor), of_row[2] = {beta[0] * by, beta[8] * by};
    float w_of_thread[32], sums[2] = {0, 0};
    load_block(w_of_thread, w(j), 0, 1.f);
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      sums[e / 2 % 2] = fmaf(m[e], w_of_thread[e], sums[e / 2 % 2]);
      w_of_thread[e] *= of_row[e / 2 % 2];
    }
    store(w(j), w_of_thread, 1.f);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = row_sum(sums[i]);
      if (lane_id() % 4 == 0) floats(Memory::kRowSums)[j * kBlock + own_row() + 8 * i] = sum;
    }
  }
};

// A CTA a block and key head: neighbours in memory, the heads of a tile, run side by side.
template <int K, int V, bool kPath, bool kGate>
__global__ void __launch_bounds__(BlockMemory<K, V>::kThreads, BlockMemory<K, V>::kCtas)
    differentiate_blocks(const __grid_constant__ Call call, const __grid_constant__ LocalGradients gradients) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Memory = BlockMemory<K, V>;
  const int index = blockIdx.x / 2 / gradients.num_units, half = blockIdx.x % 2,
            group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  using Adjoint = BlockAdjoint<K, V, kPath, kGate>;
  // All that the place of the block is enough for, before the first wait.
  const Unit unit = key_unit(call, blockIdx.x / 2 % gradients.num_units);
  const int64_t tile_slot = slot(call, unit.local, index);
  const float key_factor = call.at.key_factors[tile_slot], minus_factor = kPath ? -call.at.transform_factors[2 * tile_slot + half] : 1,
              value_factor = call.at.value_factors[tile_slot];
  const auto head_factors = Adjoint::factors_of_head(call, gradients, slot(call, unit.local * call.group, index));
  const Tile tile = call.at.tiles[index];
  const int count = min(tile.count - half * kBlock, kBlock);
  if (index >= *call.at.num_tiles || count <= 0) return;
  if (threadIdx.x == 0) {
    init_barrier(reinterpret_cast<uint64_t*>(shared + Memory::kBarrier), 1);
    fence_barrier_init();
  }
  __syncthreads();
  Adjoint adjoint{call,
                  gradients,
                  shared,
                  tile,
                  unit,
                  index,
                  half,
                  group,
                  count,
                  BlockInputs(tile, half),
                  key_factor,
                  minus_factor,
                  minus_factor * key_factor,
                  value_factor,
                  head_factors};
  float dk[32], dw[32];
  for (int member = 0; member < call.group; ++member) adjoint.add_head(member, dk, dw);
  adjoint.finish(dk, dw);
}

}  // namespace pathattn::cuda::hopper
