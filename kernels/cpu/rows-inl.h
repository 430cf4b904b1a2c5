// SIMD steps on rows of keys, values and matrices, from which decoding and prefill are made. Included once for each instruction set.
// A row's result never depends on how many other rows are worked on beside it. Stored: float, BFloat16 or double; Compute: what it is computed in.
#if defined(PATHATTN_KERNELS_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PATHATTN_KERNELS_CPU_ROWS_INL_H_
#undef PATHATTN_KERNELS_CPU_ROWS_INL_H_
#else
#define PATHATTN_KERNELS_CPU_ROWS_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/element.h"
#include "kernels/cpu/product_scratch.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/problem.h"

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <typename Compute>
using Tag = hn::ScalableTag<Compute>;
template <typename Compute>
using Vector = hn::Vec<Tag<Compute>>;

template <typename Compute>
HWY_INLINE int64_t num_lanes() {
  return static_cast<int64_t>(hn::Lanes(Tag<Compute>()));
}

template <typename Compute>
HWY_INLINE Vector<Compute> load(const Compute* in) {
  return hn::LoadU(Tag<Compute>(), in);
}
HWY_INLINE Vector<float> load(const BFloat16* in) {
  const Tag<float> d;
  const hn::Rebind<uint32_t, decltype(d)> d32;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, &in->bits))));
}

// The first `count` lanes, zero beyond: reads nothing past them.
template <typename Stored>
HWY_INLINE Vector<ComputeOf<Stored>> load_first(const Stored* in, int64_t count) {
  using Compute = ComputeOf<Stored>;
  HWY_ALIGN Compute lanes[HWY_MAX_BYTES / sizeof(Compute)] = {};
  for (int64_t c = 0; c < count; ++c) lanes[c] = to_compute(in[c]);
  return hn::Load(Tag<Compute>(), lanes);
}

template <typename Compute>
HWY_INLINE void store_first(Vector<Compute> v, Compute* out, int64_t count) {
  HWY_ALIGN Compute lanes[HWY_MAX_BYTES / sizeof(Compute)];
  hn::Store(v, Tag<Compute>(), lanes);
  for (int64_t c = 0; c < count; ++c) out[c] = lanes[c];
}

// As many lanes as are left in a row of which `count` elements are left.
template <typename Stored>
HWY_INLINE Vector<ComputeOf<Stored>> load_some(const Stored* in, int64_t count) {
  return count >= num_lanes<ComputeOf<Stored>>() ? load(in) : load_first(in, count);
}

template <typename Compute>
HWY_INLINE void store_some(Vector<Compute> v, Compute* out, int64_t count) {
  if (count >= num_lanes<Compute>()) {
    hn::StoreU(v, Tag<Compute>(), out);
  } else {
    store_first(v, out, count);
  }
}

template <typename Stored>
HWY_INLINE void read_row(const Stored* in, int64_t width, ComputeOf<Stored>* out) {
  for (int64_t c = 0; c < width; ++c) out[c] = to_compute(in[c]);
}

template <typename Element>
HWY_INLINE void copy_row(const Element* in, int64_t width, Element* out) {
  for (int64_t c = 0; c < width; ++c) out[c] = in[c];
}

template <typename Stored>
HWY_INLINE void write_row(const ComputeOf<Stored>* in, int64_t width, Stored* out) {
  for (int64_t c = 0; c < width; ++c) out[c] = from_compute<Stored>(in[c]);
}

template <int kQueries, int kKeys, typename Stored, typename Compute>
HWY_INLINE void dot_tile(const Compute* queries, const Stored* keys, int64_t width, Compute* out, int64_t out_stride) {
  const Tag<Compute> d;
  const int64_t lanes = num_lanes<Compute>();
  Vector<Compute> sums[kQueries][kKeys];
  for (int r = 0; r < kQueries; ++r) {
    for (int j = 0; j < kKeys; ++j) sums[r][j] = hn::Zero(d);
  }
  int64_t c = 0;
  for (; c + lanes <= width; c += lanes) {
    Vector<Compute> query[kQueries];
    for (int r = 0; r < kQueries; ++r) query[r] = load(queries + r * width + c);
    for (int j = 0; j < kKeys; ++j) {
      const Vector<Compute> key = load(keys + j * width + c);
      for (int r = 0; r < kQueries; ++r) sums[r][j] = hn::MulAdd(query[r], key, sums[r][j]);
    }
  }
  if (c < width) {
    for (int j = 0; j < kKeys; ++j) {
      const Vector<Compute> key = load_first(keys + j * width + c, width - c);
      for (int r = 0; r < kQueries; ++r) sums[r][j] = hn::MulAdd(load_first(queries + r * width + c, width - c), key, sums[r][j]);
    }
  }
  for (int r = 0; r < kQueries; ++r) {
    for (int j = 0; j < kKeys; ++j) out[r * out_stride + j] = hn::GetLane(hn::SumOfLanes(d, sums[r][j]));
  }
}

template <int kQueries, int kKeys, typename Stored, typename Compute>
HWY_INLINE void dot_tiles(const Compute* queries, const Stored* keys, int64_t num_keys, int64_t width, Compute* out, int64_t out_stride) {
  const int64_t in_tiles = num_keys - num_keys % kKeys;
  for (int64_t j = 0; j < in_tiles; j += kKeys) dot_tile<kQueries, kKeys>(queries, keys + j * width, width, out + j, out_stride);
  for (int64_t j = in_tiles; j < num_keys; ++j) dot_tile<kQueries, 1>(queries, keys + j * width, width, out + j, out_stride);
}

// out[r, j] = queries[r] . keys[j]; rows of queries and keys are `width` apart, rows of out `out_stride`.
template <typename Stored, typename Compute>
HWY_NOINLINE void dot_rows(const Compute* queries, int64_t num_queries, const Stored* keys, int64_t num_keys, int64_t width, Compute* out,
                           int64_t out_stride) {
  int64_t r = 0;
  for (; r + 4 <= num_queries; r += 4) dot_tiles<4, 2>(queries + r * width, keys, num_keys, width, out + r * out_stride, out_stride);
  for (; r + 2 <= num_queries; r += 2) dot_tiles<2, 4>(queries + r * width, keys, num_keys, width, out + r * out_stride, out_stride);
  for (; r < num_queries; ++r) dot_tiles<1, 8>(queries + r * width, keys, num_keys, width, out + r * out_stride, out_stride);
}

template <int kQueries, int kValues, typename Stored, typename Compute>
HWY_INLINE void add_weighted_tile(const Compute* weights, int64_t weight_stride, const Stored* values, int64_t width, Compute* out) {
  const Tag<Compute> d;
  const int64_t lanes = num_lanes<Compute>();
  for (int64_t c = 0; c < width; c += lanes) {
    Vector<Compute> value[kValues];
    for (int j = 0; j < kValues; ++j) value[j] = load_some(values + j * width + c, width - c);
    for (int r = 0; r < kQueries; ++r) {
      Vector<Compute> sum = load_some(out + r * width + c, width - c);
      for (int j = 0; j < kValues; ++j) sum = hn::MulAdd(hn::Set(d, weights[r * weight_stride + j]), value[j], sum);
      store_some(sum, out + r * width + c, width - c);
    }
  }
}

template <int kQueries, typename Stored, typename Compute>
HWY_INLINE void add_weighted_tiles(const Compute* weights, int64_t weight_stride, const Stored* values, int64_t num_values, int64_t width,
                                   Compute* out) {
  int64_t j = 0;
  for (; j + 4 <= num_values; j += 4) add_weighted_tile<kQueries, 4>(weights + j, weight_stride, values + j * width, width, out);
  for (; j < num_values; ++j) add_weighted_tile<kQueries, 1>(weights + j, weight_stride, values + j * width, width, out);
}

// out[r] = sum_j weights[r, j] values[j]; rows of values and out are `width` apart, rows of weights `weight_stride`.
template <typename Stored, typename Compute>
HWY_NOINLINE void weighted_rows(const Compute* weights, int64_t weight_stride, int64_t num_queries, const Stored* values, int64_t num_values,
                                int64_t width, Compute* out) {
  for (int64_t c = 0; c < num_queries * width; ++c) out[c] = 0;
  for (int64_t j = 0; j < num_values; j += 8) {  // few values at a time, so that all queries meet them in the nearest cache
    const int64_t count = HWY_MIN(num_values - j, 8);
    const Stored* some = values + j * width;
    int64_t r = 0;
    for (; r + 4 <= num_queries; r += 4) add_weighted_tiles<4>(weights + r * weight_stride + j, weight_stride, some, count, width, out + r * width);
    for (; r < num_queries; ++r) add_weighted_tiles<1>(weights + r * weight_stride + j, weight_stride, some, count, width, out + r * width);
  }
}

// rows[r] -= beta (rows[r] . w) w: every row goes through H = I - beta w^T w.
template <typename Compute>
HWY_NOINLINE void reflect_rows(Compute* rows, int64_t num_rows, int64_t width, const Compute* w, Compute beta) {
  const Tag<Compute> d;
  const int64_t lanes = num_lanes<Compute>();
  constexpr int64_t kTogether = 8;
  for (int64_t r = 0; r < num_rows; r += kTogether) {
    const int64_t count = HWY_MIN(num_rows - r, kTogether);
    Compute factors[kTogether];
    dot_rows(w, 1, rows + r * width, count, width, factors, 0);
    for (int64_t j = 0; j < count; ++j) {
      Compute* row = rows + (r + j) * width;
      const Vector<Compute> factor = hn::Set(d, -beta * factors[j]);
      for (int64_t c = 0; c < width; c += lanes) {
        store_some(hn::MulAdd(factor, load_some(w + c, width - c), load_some(row + c, width - c)), row + c, width - c);
      }
    }
  }
}

// out[r] = in[r] matrix, matrix [width, width]; out may be in. out has the compute type or that of in.
template <typename Stored, typename Out>
HWY_NOINLINE void multiply_rows(const Stored* in, int64_t num_rows, const ComputeOf<Stored>* matrix, int64_t width, Out* out,
                                const ProductScratch<ComputeOf<Stored>>& scratch) {
  using Compute = ComputeOf<Stored>;
  const int64_t stride = row_stride<Compute>(width), wide = padded<Compute>(width);
  load_rows(matrix, kDTypeOf<Compute>, width, width, width, Compute(1), scratch.matrix, stride, width, wide);
  const Compute* packed = scratch.matrix;
  for (int64_t r = 0; r < num_rows; r += ProductScratch<Compute>::kRows) {
    const int64_t count = HWY_MIN(num_rows - r, ProductScratch<Compute>::kRows);
    for (int64_t j = 0; j < count; ++j) read_row(in + (r + j) * width, width, scratch.rows + j * stride);
    multiply(Into::kSet, count, wide, width, left(scratch.rows, stride), rows(packed, stride), rows(scratch.products, stride));
    for (int64_t j = 0; j < count; ++j) write_row(scratch.products + j * stride, width, out + (r + j) * width);
  }
}

template <typename Compute>
void set_identity(Compute* matrix, int64_t width) {
  for (int64_t c = 0; c < width * width; ++c) matrix[c] = 0;
  for (int64_t c = 0; c < width; ++c) matrix[c * width + c] = 1;
}

// scores[j] = scale * scores[j] + the gates after key j. decays[j]: their sum inside the key's chunk, for all keys but the last, whose sum is 0; null
// without a gate. offset: the sum over later chunks. gate_factor multiplies the sums, but -inf stays -inf.
template <typename Compute>
HWY_NOINLINE void finish_scores(Compute* scores, int64_t num_keys, Compute scale, const Compute* decays, Compute offset, Compute gate_factor) {
  const Tag<Compute> d;
  const int64_t lanes = num_lanes<Compute>();
  const Vector<Compute> cut = hn::Set(d, -std::numeric_limits<Compute>::infinity());
  for (int64_t j = 0; j < num_keys; j += lanes) {
    Vector<Compute> score = hn::Mul(hn::Set(d, scale), load_some(scores + j, num_keys - j));
    if (decays) {
      const Vector<Compute> gates = hn::Add(load_some(decays + j, num_keys - 1 - j), hn::Set(d, offset));
      score = hn::IfThenElse(hn::Eq(gates, cut), cut, hn::MulAdd(hn::Set(d, gate_factor), gates, score));
    }
    store_some(score, scores + j, num_keys - j);
  }
}

// Part of a softmax: scores become exp(scores - highest). Keys that are all cut (-inf) leave sum 0.
template <typename Compute>
HWY_NOINLINE void exponentiate(Compute* scores, int64_t num_keys, Compute* highest, Compute* sum) {
  const Tag<Compute> d;
  const int64_t lanes = num_lanes<Compute>();
  Compute top = std::numeric_limits<Compute>::lowest();
  for (int64_t j = 0; j < num_keys; ++j) top = scores[j] > top ? scores[j] : top;
  Vector<Compute> sums = hn::Zero(d);
  for (int64_t j = 0; j < num_keys; j += lanes) {
    const int64_t count = num_keys - j;
    const Vector<Compute> x = hn::Sub(load_some(scores + j, count), hn::Set(d, top));
    Vector<Compute> e = exp(d, x);
    if (count < lanes) e = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(count)), e);
    sums = hn::Add(sums, e);
    store_some(e, scores + j, count);
  }
  *highest = top;
  *sum = hn::GetLane(hn::SumOfLanes(d, sums));
}

}  // namespace pathattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
