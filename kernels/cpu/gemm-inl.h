// Small matrix products out of caches: C (+-)= A B with register blocks of 6 rows by two vectors.
// Every operand is a tile in a workspace: its width is padded with zeros to whole vectors, its rows are 64-byte aligned.

#if defined(PATHATTN_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PATHATTN_CPU_GEMM_INL_H_
#undef PATHATTN_CPU_GEMM_INL_H_
#else
#define PATHATTN_CPU_GEMM_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Columns of a register block, and of a panel of packed columns.
template <typename T>
inline constexpr ptrdiff_t kPanel = 2 * hn::MaxLanes(hn::ScalableTag<T>());

// Element (i, p) at data[i * row + p * column]: a left operand, read one scalar at a time, so that its transpose is the same memory.
template <typename T>
struct Left {
  const T* data;
  ptrdiff_t row, column;
};

template <typename T>
Left<T> left(const T* data, ptrdiff_t stride) {
  return {data, stride, 1};
}
template <typename T>
Left<T> transposed(const T* data, ptrdiff_t stride) {
  return {data, 1, stride};
}

// Element (p, j) at data[j / kPanel * panel + p * row + j % kPanel]: a right operand or a result.
template <typename T>
struct Panels {
  T* data;
  ptrdiff_t row, panel;
  Panels from_row(ptrdiff_t p) const { return {data + p * row, row, panel}; }
  operator Panels<const T>() const { return {data, row, panel}; }
};

// Rows one after another.
template <typename T>
Panels<T> rows(T* data, ptrdiff_t stride) {
  return {data, stride, kPanel<std::remove_const_t<T>>};
}
// The transpose [width, tokens] of a tile whose tokens are packed kPanel at a time: [tokens / kPanel][width][kPanel].
template <typename T>
Panels<T> columns(T* data, ptrdiff_t width) {
  return {data, kPanel<std::remove_const_t<T>>, width * kPanel<std::remove_const_t<T>>};
}

enum class Into { kSet, kAdd, kSubtract };

template <int kRows, int kVectors, typename T>
HWY_INLINE void multiply_block(Into into, ptrdiff_t depth, const Left<T>& a, const T* HWY_RESTRICT b, ptrdiff_t b_row, T* HWY_RESTRICT c,
                               ptrdiff_t c_row) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr ptrdiff_t kLanes = hn::MaxLanes(d);
  V sum[kRows][kVectors];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(d);
  }
  const T* HWY_RESTRICT at = a.data;
  for (ptrdiff_t p = 0; p < depth; ++p, at += a.column, b += b_row) {
    V right[kVectors];
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) right[v] = hn::Load(d, b + v * kLanes);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const V scalar = hn::Set(d, at[r * a.row]);
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(scalar, right[v], sum[r][v]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      T* to = c + r * c_row + v * kLanes;
      if (into == Into::kAdd) sum[r][v] = hn::Add(hn::Load(d, to), sum[r][v]);
      if (into == Into::kSubtract) sum[r][v] = hn::Sub(hn::Load(d, to), sum[r][v]);
      hn::Store(sum[r][v], d, to);
    }
  }
}

template <int kVectors, typename T>
HWY_INLINE void multiply_panel(Into into, ptrdiff_t m, ptrdiff_t depth, Left<T> a, const T* b, ptrdiff_t b_row, T* c, ptrdiff_t c_row) {
  const auto advance = [&](ptrdiff_t count) {
    a.data += count * a.row;
    c += count * c_row;
    m -= count;
  };
  for (; m >= 6 && m != 8; advance(6)) multiply_block<6, kVectors>(into, depth, a, b, b_row, c, c_row);
  for (; m >= 4; advance(4)) multiply_block<4, kVectors>(into, depth, a, b, b_row, c, c_row);
  if (m >= 2) {
    multiply_block<2, kVectors>(into, depth, a, b, b_row, c, c_row);
    advance(2);
  }
  if (m == 1) multiply_block<1, kVectors>(into, depth, a, b, b_row, c, c_row);
}

// C[m, n] = A B, += A B or -= A B; A [m, depth], B [depth, n]; n a multiple of the vector length. C overlaps neither A nor B.
template <typename T>
HWY_NOINLINE void multiply(Into into, ptrdiff_t m, ptrdiff_t n, ptrdiff_t depth, Left<T> a, Panels<const T> b, Panels<T> c) {
  ptrdiff_t j = 0;
  for (; j + kPanel<T> <= n; j += kPanel<T>, b.data += b.panel, c.data += c.panel) multiply_panel<2>(into, m, depth, a, b.data, b.row, c.data, c.row);
  if (j < n) multiply_panel<1>(into, m, depth, a, b.data, b.row, c.data, c.row);
}

}  // namespace HWY_NAMESPACE
}  // namespace pathattn::cpu
HWY_AFTER_NAMESPACE();

#endif
