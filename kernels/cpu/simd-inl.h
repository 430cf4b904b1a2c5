// Elementwise pieces: exp, conversion of rows on their way in and out, transposition into panels.

#if defined(PATHATTN_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PATHATTN_CPU_SIMD_INL_H_
#undef PATHATTN_CPU_SIMD_INL_H_
#else
#define PATHATTN_CPU_SIMD_INL_H_
#endif

#include <cstring>
#include <limits>

#include "kernels/cpu/element.h"
#include "kernels/cpu/gemm-inl.h"
#include "kernels/cpu/layout.h"

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

// e^x for x up to 80, within a few units in the last place of a result near 1; exactly 0 below e^-86 (float32) or e^-700; NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> exp(D d, hn::Vec<D> x) {
  using T = hn::TFromD<D>;
  constexpr bool kDouble = sizeof(T) == 8;
  // n = x / ln 2 to the nearest integer, which adding 1.5 * 2^mantissa_bits leaves in the low bits; e^x = 2^n 2^f, |f| <= 1/2.
  const auto magic = hn::Set(d, kDouble ? T(6755399441055744.0) : T(12582912.0));
  const auto log2e = hn::Set(d, T(1.4426950408889634074));
  const auto shifted = hn::MulAdd(x, log2e, magic);
  const auto n = hn::Sub(shifted, magic);
  hn::Vec<D> y;
  if constexpr (kDouble) {
    // Taylor series of e^r, r = x - n ln 2 with ln 2 in two parts: the first term left out is below 2^-56.
    const auto r = hn::NegMulAdd(n, hn::Set(d, T(2.3190468138462995584e-17)), hn::NegMulAdd(n, hn::Set(d, T(0.69314718055994528623)), x));
    constexpr double kTerms[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                 1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       1.0 / 2,      1.0,         1.0};
    y = hn::Set(d, T(kTerms[0]));
    HWY_UNROLL(13)
    for (int i = 1; i < 14; ++i) y = hn::MulAdd(y, r, hn::Set(d, T(kTerms[i])));
  } else {
    // Minimax polynomial of 2^f, relative error 2e-9 before rounding.
    const auto f = hn::MulSub(x, log2e, n);
    y = hn::MulAdd(hn::Set(d, T(1.5353361171534935e-4)), f, hn::Set(d, T(1.3398874662556362e-3)));
    y = hn::MulAdd(y, f, hn::Set(d, T(9.618437362611663e-3)));
    y = hn::MulAdd(y, f, hn::Set(d, T(5.550332470340098e-2)));
    y = hn::MulAdd(y, f, hn::Set(d, T(2.402264791355622e-1)));
    y = hn::MulAdd(y, f, hn::Set(d, T(6.931472028555618e-1)));
    y = hn::MulAdd(y, f, hn::Set(d, T(1)));
  }
  const hn::RebindToSigned<D> di;
  const auto power = hn::ShiftLeft < kDouble ? 52 : 23 > (hn::BitCast(di, shifted));
  y = hn::BitCast(d, hn::Add(hn::BitCast(di, y), power));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, kDouble ? T(-700) : T(-86))), y);
}

// out[i][0 .. width) = factor * row i of `from`, then zeros up to `padded_width`, and zero rows up to `padded_rows`.
template <typename T>
void load_rows(const void* from, DType dtype, int64_t from_stride, int64_t num_rows, int64_t width, T factor, T* HWY_RESTRICT out, int64_t stride,
               int64_t padded_rows, int64_t padded_width) {
  for (int64_t i = 0; i < num_rows; ++i, out += stride) {
    if (dtype == DType::kBFloat16) {
      const BFloat16* row = static_cast<const BFloat16*>(from) + i * from_stride;
      for (int64_t c = 0; c < width; ++c) out[c] = factor * static_cast<T>(to_compute(row[c]));
    } else {
      const T* row = static_cast<const T*>(from) + i * from_stride;
      for (int64_t c = 0; c < width; ++c) out[c] = factor * row[c];
    }
    for (int64_t c = width; c < padded_width; ++c) out[c] = 0;
  }
  for (int64_t i = num_rows; i < padded_rows; ++i, out += stride) std::memset(out, 0, padded_width * sizeof(T));
}

// Row i of `to` = factors[i] * row i of `from`, rounded to dtype.
template <typename T, typename Factor>
void store_rows(const T* HWY_RESTRICT from, int64_t stride, int64_t num_rows, int64_t width, Factor factor, void* to, DType dtype,
                int64_t to_stride) {
  for (int64_t i = 0; i < num_rows; ++i, from += stride) {
    const T f = factor(i);
    if (dtype == DType::kBFloat16) {
      BFloat16* row = static_cast<BFloat16*>(to) + i * to_stride;
      for (int64_t c = 0; c < width; ++c) row[c] = to_bfloat16(static_cast<float>(f * from[c]));
    } else {
      T* row = static_cast<T*>(to) + i * to_stride;
      for (int64_t c = 0; c < width; ++c) row[c] = f * from[c];
    }
  }
}

// The element of head `head` at the unit's token `token`.
template <typename T, typename AnyView>
auto element(const AnyView& view, const Unit& unit, int64_t head, int64_t token) {
  using Void = std::remove_pointer_t<decltype(view.data)>;
  using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
  return static_cast<Element*>(view.data) + unit.batch * view.batch_stride + (unit.first + token) * view.token_stride + head * view.head_stride;
}

// Rows of a tensor of the problem's dtype, as load_rows and store_rows.
template <typename T>
void load_tile(DType dtype, const ConstView& view, const Unit& unit, int64_t head, int64_t first, int64_t m, int64_t width, T factor, T* out,
               int64_t padded_rows) {
  const void* from =
      dtype == DType::kBFloat16 ? static_cast<const void*>(element<uint16_t>(view, unit, head, first)) : element<T>(view, unit, head, first);
  load_rows<T>(from, dtype, view.token_stride, m, width, factor, out, row_stride<T>(width), padded_rows, padded<T>(width));
}
template <typename T, typename Factor>
void store_tile(DType dtype, const T* from, int64_t m, int64_t width, Factor factor, const View& view, const Unit& unit, int64_t head,
                int64_t first) {
  void* to = dtype == DType::kBFloat16 ? static_cast<void*>(element<uint16_t>(view, unit, head, first)) : element<T>(view, unit, head, first);
  store_rows(from, row_stride<T>(width), m, width, factor, to, dtype, view.token_stride);
}

// Rows as packed columns: columns(out, width) is their transpose.
template <typename T>
void pack_columns(const T* HWY_RESTRICT from, int64_t stride, int64_t num_rows, int64_t width, T* HWY_RESTRICT out) {
  constexpr int64_t kWide = kPanel<T>;
  for (int64_t i = 0; i < num_rows; ++i) {
    T* to = out + i / kWide * width * kWide + i % kWide;
    for (int64_t c = 0; c < width; ++c) to[c * kWide] = from[i * stride + c];
  }
}

template <typename T>
void unpack_columns(const T* HWY_RESTRICT packed, int64_t num_rows, int64_t width, T* HWY_RESTRICT out, int64_t stride) {
  constexpr int64_t kWide = kPanel<T>;
  for (int64_t i = 0; i < num_rows; ++i) {
    const T* from = packed + i / kWide * width * kWide + i % kWide;
    for (int64_t c = 0; c < width; ++c) out[i * stride + c] = from[c * kWide];
  }
}

template <typename T>
HWY_INLINE void scale_row(T* HWY_RESTRICT row, int64_t width, T factor) {
  const hn::ScalableTag<T> d;
  const auto f = hn::Set(d, factor);
  for (int64_t c = 0; c < width; c += static_cast<int64_t>(hn::Lanes(d))) hn::Store(hn::Mul(hn::Load(d, row + c), f), d, row + c);
}

}  // namespace HWY_NAMESPACE
}  // namespace pathattn::cpu
HWY_AFTER_NAMESPACE();

#endif
