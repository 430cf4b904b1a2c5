// A tile's products of H in closed form (UT transform), and their composition into larger nodes. docs/cpu-kernels.md has the equations:
//   N = tril(B W W^T, -1)   U = (I + N)^-1 B W   X = (I + N)^-1 tril(B W K^T, -1)   K-> = K - X^T W   G = I - W^T U        B = diag(beta)

#if defined(PATHATTN_CPU_PREPARE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PATHATTN_CPU_PREPARE_INL_H_
#undef PATHATTN_CPU_PREPARE_INL_H_
#else
#define PATHATTN_CPU_PREPARE_INL_H_
#endif

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu {
namespace HWY_NAMESPACE {

inline constexpr int64_t kBlock = 16;  // rows of a triangle that are computed together

// C[i][j] = (A B)[i][j] for j up to the end of i's block: the lower triangle, and a little more.
template <typename T>
void multiply_lower(Into into, int64_t m, int64_t depth, Left<T> a, Panels<const T> b, T* c, int64_t c_stride) {
  for (int64_t i = 0; i < m; i += kBlock, a.data += kBlock * a.row) {
    multiply<T>(into, std::min(kBlock, m - i), i + kBlock, depth, a, b, rows(c + i * c_stride, c_stride));
  }
}

// Y <- (I + N)^-1 Y for strictly lower triangular N [m, m], m a multiple of 8. `width` columns; if `lower`, Y too is strictly lower triangular.
template <typename T>
void solve_unit_lower(int64_t m, const T* HWY_RESTRICT n, int64_t n_stride, T* HWY_RESTRICT y, int64_t y_stride, int64_t width, bool lower) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int kRows = 8;
  for (int64_t i = 0; i < m; i += kRows) {
    const int64_t columns = lower ? std::min(width, round_up(i + kRows, kBlock)) : width;
    const T* block = n + i * n_stride;
    if (i > 0) multiply<T>(Into::kSubtract, kRows, columns, i, left(block, n_stride), rows<const T>(y, y_stride), rows(y + i * y_stride, y_stride));
    for (int64_t c = 0; c < columns; c += static_cast<int64_t>(hn::Lanes(d))) {
      T* at = y + i * y_stride + c;
      V r[kRows];
      HWY_UNROLL(8)
      for (int a = 0; a < kRows; ++a) r[a] = hn::Load(d, at + a * y_stride);
      HWY_UNROLL(8)
      for (int a = 1; a < kRows; ++a) {
        HWY_UNROLL(8)
        for (int b = 0; b < a; ++b) r[a] = hn::NegMulAdd(hn::Set(d, block[a * n_stride + i + b]), r[b], r[a]);
      }
      HWY_UNROLL(8)
      for (int a = 1; a < kRows; ++a) hn::Store(r[a], d, at + a * y_stride);
    }
  }
}

// One tile of W and K, and what the transform makes of them. Rows up to `padded_rows` (a multiple of kBlock) exist; those beyond the tokens are zero.
template <typename T>
struct Tile {
  int64_t padded_rows, width, stride;  // stride: of w, u and g
  const T* w;                          // [padded_rows][stride]
  const T* beta;                       // [padded_rows]
  T* w_columns;                        // columns(w_columns, width) = W^T
  T* k_columns;                        // columns(k_columns, width): K^T on entry, (K->)^T on return
  T* n;                                // [padded_rows][kTile]
  T* x;                                // [padded_rows][kTile]
  T* u;                                // [padded_rows][stride]
  T* g;                                // [width][stride]
};

// Strictly lower part of a [m, m] product of rows of W, times beta row by row.
template <typename T>
void scale_strictly_lower(int64_t m, const T* beta, T* HWY_RESTRICT x) {
  for (int64_t i = 0; i < m; ++i, x += kTile) {
    for (int64_t j = 0; j < i; ++j) x[j] *= beta[i];
    for (int64_t j = i; j < m; ++j) x[j] = 0;
  }
}

template <typename T>
void identity(int64_t width, T* HWY_RESTRICT g, int64_t stride) {
  for (int64_t i = 0; i < width; ++i) {
    std::memset(g + i * stride, 0, padded<T>(width) * sizeof(T));
    g[i * stride + i] = 1;
  }
}

template <typename T>
void prepare_tile(const Tile<T>& t) {
  const int64_t m = t.padded_rows, wide = padded<T>(t.width);
  pack_columns(t.w, t.stride, m, t.width, t.w_columns);
  multiply_lower<T>(Into::kSet, m, t.width, left(t.w, t.stride), columns<const T>(t.w_columns, t.width), t.n, kTile);
  multiply_lower<T>(Into::kSet, m, t.width, left(t.w, t.stride), columns<const T>(t.k_columns, t.width), t.x, kTile);
  scale_strictly_lower(m, t.beta, t.n);
  scale_strictly_lower(m, t.beta, t.x);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t c = 0; c < wide; ++c) t.u[i * t.stride + c] = t.beta[i] * t.w[i * t.stride + c];
  }
  solve_unit_lower(m, t.n, kTile, t.x, kTile, m, true);
  solve_unit_lower(m, t.n, kTile, t.u, t.stride, wide, false);
  for (int64_t j = 0; j < m; j += kPanel<T>) {  // column j of X is zero down to row j
    multiply<T>(Into::kSubtract, t.width, std::min<int64_t>(kPanel<T>, m - j), m - j, transposed(t.w + j * t.stride, t.stride),
                rows<const T>(t.x + j * kTile + j, kTile), columns(t.k_columns + j * t.width, t.width));
  }
  identity(t.width, t.g, t.stride);
  multiply<T>(Into::kSubtract, t.width, wide, m, transposed(t.w, t.stride), rows<const T>(t.u, t.stride), rows(t.g, t.stride));
}

// Right to left over the children of a node: (K->)^T of the child becomes S (K->)^T, then S becomes S G, where S starts as the identity.
template <typename T>
class Suffix {
 public:
  Suffix(int64_t width, T* two_matrices) : width_(width), stride_(row_stride<T>(width)), now_(two_matrices), next_(two_matrices + width * stride_) {}
  // to = S from, for packed columns of num_tokens tokens.
  void carry(const T* from, T* to, int64_t num_tokens) const {
    if (empty_) {
      std::memcpy(to, from, width_ * num_tokens * sizeof(T));
    } else {
      multiply<T>(Into::kSet, width_, num_tokens, width_, left<T>(now_, stride_), columns<const T>(from, width_), columns(to, width_));
    }
  }
  void append(const T* g) {
    if (empty_) {
      std::memcpy(now_, g, width_ * stride_ * sizeof(T));
      empty_ = false;
      return;
    }
    multiply<T>(Into::kSet, width_, padded<T>(width_), width_, left<T>(now_, stride_), rows<const T>(g, stride_), rows(next_, stride_));
    std::swap(now_, next_);
  }
  const T* product() const { return now_; }
  bool empty() const { return empty_; }

 private:
  int64_t width_, stride_;
  T *now_, *next_;
  bool empty_ = true;
};

}  // namespace HWY_NAMESPACE
}  // namespace pathattn::cpu
HWY_AFTER_NAMESPACE();

#endif
