// Gradients of one tile of keys against one tile of queries, and of a tile against itself together with its products of H (the adjoint of the UT
// transform). docs/cpu-kernels.md has the equations.

#if defined(PATHATTN_CPU_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PATHATTN_CPU_GRADIENTS_INL_H_
#undef PATHATTN_CPU_GRADIENTS_INL_H_
#else
#define PATHATTN_CPU_GRADIENTS_INL_H_
#endif

#include "kernels/cpu/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu {
namespace HWY_NAMESPACE {

// C (+-)= L B and C (+-)= L^T B for lower triangular L [m, m] in rows kTile apart, zero above its diagonal; B and C [m, n].
template <typename T>
void lower_times(Into into, int64_t m, int64_t n, const T* l, Panels<const T> b, Panels<T> c) {
  for (int64_t i = 0; i < m; i += kBlock) multiply<T>(into, kBlock, n, i + kBlock, left(l + i * kTile, kTile), b, c.from_row(i));
}
template <typename T>
void lower_transposed_times(Into into, int64_t m, int64_t n, const T* l, Panels<const T> b, Panels<T> c) {
  for (int64_t i = 0; i < m; i += kBlock) {
    multiply<T>(into, kBlock, n, m - i, transposed(l + i * kTile + i, kTile), b.from_row(i), c.from_row(i));
  }
}

template <typename T>
void keep_lower(int64_t m, bool strictly, T* HWY_RESTRICT x) {
  for (int64_t i = 0; i < m; ++i, x += kTile) {
    for (int64_t j = strictly ? i : i + 1; j < m; ++j) x[j] = 0;
  }
}

// Y <- (I + N)^-T Y for strictly lower triangular N [m, m]. `width` columns.
template <typename T>
void solve_unit_lower_transposed(int64_t m, const T* HWY_RESTRICT n, int64_t n_stride, T* HWY_RESTRICT y, int64_t y_stride, int64_t width) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int kRows = 8;
  for (int64_t i = m - kRows; i >= 0; i -= kRows) {
    const int64_t below = i + kRows;
    if (below < m) {
      multiply<T>(Into::kSubtract, kRows, width, m - below, transposed(n + below * n_stride + i, n_stride),
                  rows<const T>(y + below * y_stride, y_stride), rows(y + i * y_stride, y_stride));
    }
    const T* block = n + i * n_stride + i;
    for (int64_t c = 0; c < width; c += static_cast<int64_t>(hn::Lanes(d))) {
      T* at = y + i * y_stride + c;
      V r[kRows];
      HWY_UNROLL(8)
      for (int a = 0; a < kRows; ++a) r[a] = hn::Load(d, at + a * y_stride);
      HWY_UNROLL(8)
      for (int a = kRows - 2; a >= 0; --a) {
        HWY_UNROLL(8)
        for (int b = a + 1; b < kRows; ++b) r[a] = hn::NegMulAdd(hn::Set(d, block[b * n_stride + a]), r[b], r[a]);
      }
      HWY_UNROLL(8)
      for (int a = 0; a < kRows - 1; ++a) hn::Store(r[a], d, at + a * y_stride);
    }
  }
}

// What a tile of queries brings to a pair. padded_rows rows exist; those beyond the tokens have lse = inf and zeros otherwise.
template <typename T>
struct QueryTile {
  int64_t m, padded_rows;
  const T *q, *q_columns;  // rows, and packed columns
  const T *d_o, *d_o_columns;
  const T *lse, *delta;  // [padded_rows]
  T* dq;                 // rows, added to
  double* d_sums;        // [m] sums of dS over keys, added to; null if nobody needs them
};
// A whole tile of keys, in the frame of the queries.
template <typename T>
struct KeyTile {
  const T *k, *v;
  T *dk, *dv;      // added to
  double* d_sums;  // [kTile] sums of dS over queries, added to; null without gate
};

// row_gate, key_gate: [kTile] as gates_of_rows and gates_of_keys give them; null without gate. scores, d_scores: [kTile][kTile] scratch.
//   P = exp(K Q^T + gate - lse)   dS = P (V dO^T - delta)   dv += P dO   dk += dS Q   dq += dS^T K       (keys are rows here)
template <typename T>
void add_pair(const QueryTile<T>& queries, const KeyTile<T>& keys, int64_t k_width, int64_t v_width, const T* row_gate, const T* key_gate, T* scores,
              T* d_scores) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int64_t kLanes = hn::MaxLanes(d);
  const int64_t n = queries.padded_rows, k_stride = row_stride<T>(k_width), v_stride = row_stride<T>(v_width);
  multiply<T>(Into::kSet, kTile, n, k_width, left(keys.k, k_stride), columns(queries.q_columns, k_width), rows(scores, kTile));
  multiply<T>(Into::kSet, kTile, n, v_width, left(keys.v, v_stride), columns(queries.d_o_columns, v_width), rows(d_scores, kTile));
  HWY_ALIGN T offset[kTile];
  HWY_ALIGN T sums[kTile] = {};
  for (int64_t j = 0; j < n; ++j) offset[j] = (row_gate && j < queries.m ? row_gate[j] : T(0)) - queries.lse[j];
  for (int64_t i = 0; i < kTile; ++i) {
    T *s = scores + i * kTile, *ds = d_scores + i * kTile;
    const V mine = hn::Set(d, key_gate ? key_gate[i] : T(0));
    V d_mine = hn::Zero(d);
    for (int64_t j = 0; j < n; j += kLanes) {
      const V p = exp(d, hn::Add(hn::Load(d, s + j), hn::Add(hn::Load(d, offset + j), mine)));
      const V dp = hn::Mul(p, hn::Sub(hn::Load(d, ds + j), hn::Load(d, queries.delta + j)));
      hn::Store(p, d, s + j);
      hn::Store(dp, d, ds + j);
      if (queries.d_sums) hn::Store(hn::Add(hn::Load(d, sums + j), dp), d, sums + j);
      if (keys.d_sums) d_mine = hn::Add(d_mine, dp);
    }
    if (keys.d_sums) keys.d_sums[i] += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, d_mine)));
  }
  for (int64_t j = 0; queries.d_sums && j < queries.m; ++j) queries.d_sums[j] += static_cast<double>(sums[j]);
  multiply<T>(Into::kAdd, kTile, padded<T>(v_width), n, left<T>(scores, kTile), rows(queries.d_o, v_stride), rows(keys.dv, v_stride));
  multiply<T>(Into::kAdd, kTile, padded<T>(k_width), n, left<T>(d_scores, kTile), rows(queries.q, k_stride), rows(keys.dk, k_stride));
  multiply<T>(Into::kAdd, n, padded<T>(k_width), kTile, transposed<T>(d_scores, kTile), rows(keys.k, k_stride), rows(queries.dq, k_stride));
}

// A tile's inputs and everything its adjoint needs, all with padded_rows rows. Columns are packed columns of the rows of the same name.
template <typename T>
struct OwnTile {
  int64_t m, padded_rows, first, k_width, v_width;
  const T *k, *k_columns, *v_columns;
  const T *w = nullptr, *w_columns = nullptr, *u = nullptr, *u_columns = nullptr;  // null without w, as the next line's
  const T *x = nullptr, *x_columns = nullptr, *n = nullptr, *beta = nullptr;
  T *dv, *dk, *dw, *du, *dx;       // dk: gradient of K, added to; dw, du and dx [kTile][kTile] too, not without w
  T *scores, *d_scores, *r, *d_r;  // scratch [kTile][kTile]
};

// One query head's own tile. q: scaled queries; dq: dQ<- on entry, the gradient of q on return; d_q_start: scratch rows. d_row_sums, d_key_sums:
// as in add_pair. expected_sums: what the sums of dS over all of a row's keys have to be, d_lse, or null; o in bfloat16 leaves delta, and so dS / P,
// off by a constant of the row, which is seen in that sum and taken out here, where a row's weights are largest.
//   R = tril(Q W^T)   A = tril(Q K^T - R X)   dR = tril(-dQ<- U^T - dA X^T)
//   dq = dQ<- + dA K + dR W   dk += dA^T Q   du -= R^T dQ<-   dx -= R^T dA   dw += dR^T Q
template <typename T>
void add_own_tile(const OwnTile<T>& t, const T* q, const T* d_o, const T* lse, const T* delta, const Gates& gates, T* key_gate, T* dq, T* d_q_start,
                  double* d_row_sums, double* d_key_sums, const T* expected_sums) {
  const int64_t m = t.padded_rows, k_stride = row_stride<T>(t.k_width), v_stride = row_stride<T>(t.v_width), wide = padded<T>(t.k_width);
  multiply_lower<T>(Into::kSet, m, t.k_width, left(q, k_stride), columns(t.k_columns, t.k_width), t.scores, kTile);
  multiply_lower<T>(Into::kSet, m, t.v_width, left(d_o, v_stride), columns(t.v_columns, t.v_width), t.d_scores, kTile);
  if (t.w) {
    multiply_lower<T>(Into::kSet, m, t.k_width, left(q, k_stride), columns(t.w_columns, t.k_width), t.r, kTile);
    keep_lower(m, false, t.r);
    for (int64_t i = 0; i < m; i += kBlock) {
      multiply<T>(Into::kSubtract, kBlock, i + kBlock, i + kBlock, left<T>(t.r + i * kTile, kTile), rows(t.x, kTile),
                  rows(t.scores + i * kTile, kTile));
    }
  }
  const hn::ScalableTag<T> d;
  constexpr int64_t kLanes = hn::MaxLanes(d);
  for (int64_t i = 0; i < m; ++i) {
    T *s = t.scores + i * kTile, *ds = t.d_scores + i * kTile;
    const int64_t end = round_up(i + 1, kBlock);
    if (gates.sums && i < t.m) {
      gates_of_own_keys(gates, t.first, i, key_gate);
      for (int64_t j = 0; j <= i; ++j) s[j] += key_gate[j];
    }
    for (int64_t j = i + 1; j < end; ++j) s[j] = -kInfinity<T>;
    const auto own_lse = hn::Set(d, lse[i]), own_delta = hn::Set(d, delta[i]);
    for (int64_t j = 0; j < end; j += kLanes) {
      const auto p = exp(d, hn::Sub(hn::Load(d, s + j), own_lse));
      hn::Store(hn::Mul(p, hn::Sub(hn::Load(d, ds + j), own_delta)), d, ds + j);
      hn::Store(p, d, s + j);
    }
    for (int64_t j = end; j < m; ++j) s[j] = ds[j] = 0;
    for (int64_t j = i + 1; j < end; ++j) ds[j] = 0;
    if (i >= t.m) continue;
    if (expected_sums) {
      double sum = d_row_sums[i];
      for (int64_t j = 0; j <= i; ++j) sum += static_cast<double>(ds[j]);
      const T missing = expected_sums[i] - static_cast<T>(sum);
      for (int64_t j = 0; j <= i; ++j) ds[j] += missing * s[j];
    }
    for (int64_t j = 0; gates.sums && j <= i; ++j) {
      d_row_sums[i] += static_cast<double>(ds[j]);
      d_key_sums[j] += static_cast<double>(ds[j]);
    }
  }
  const Panels<T> dq_rows = rows(dq, k_stride);
  const Panels<const T> q_rows = rows(q, k_stride), d_start = rows<const T>(d_q_start, k_stride);
  lower_transposed_times<T>(Into::kAdd, m, padded<T>(t.v_width), t.scores, rows(d_o, v_stride), rows(t.dv, v_stride));
  lower_transposed_times<T>(Into::kAdd, m, wide, t.d_scores, q_rows, rows(t.dk, k_stride));
  if (t.w) {
    std::memcpy(d_q_start, dq, m * k_stride * sizeof(T));
    for (int64_t i = 0; i < m; i += kBlock) {
      const Panels<T> to = rows(t.d_r + i * kTile, kTile);
      multiply<T>(Into::kSet, kBlock, i + kBlock, t.k_width, left<T>(d_q_start + i * k_stride, k_stride), columns(t.u_columns, t.k_width), to);
      multiply<T>(Into::kAdd, kBlock, i + kBlock, i + kBlock, left<T>(t.d_scores + i * kTile, kTile), columns(t.x_columns, m), to);
    }
    keep_lower(m, false, t.d_r);  // -dR
    lower_times<T>(Into::kSubtract, m, wide, t.d_r, rows(t.w, k_stride), dq_rows);
    lower_transposed_times<T>(Into::kSubtract, m, wide, t.d_r, q_rows, rows(t.dw, k_stride));
    lower_transposed_times<T>(Into::kSubtract, m, wide, t.r, d_start, rows(t.du, k_stride));
    for (int64_t i = 0; i < m; i += kBlock) {
      multiply<T>(Into::kSubtract, kBlock, i + kBlock, m - i, transposed<T>(t.r + i * kTile + i, kTile), rows<const T>(t.d_scores + i * kTile, kTile),
                  rows(t.dx + i * kTile, kTile));
    }
  }
  lower_times<T>(Into::kAdd, m, wide, t.d_scores, rows(t.k, k_stride), dq_rows);
}

// The rest of a tile, once all query heads have added to dw, du, dx and dk. d_end: dK->; d_end_columns, d_g_columns: it and dG, packed;
// ww, wk, e: scratch [kTile][kTile]. With B = diag(beta):
//   dU -= W dG   dX -= W dK->^T   R_W = (I + N)^-T dU   R_X = (I + N)^-T dX   dN = -tril(R_W U^T + R_X X^T, -1)   E = B dN
//   dw += B R_W - U dG^T - X dK-> + tril(B R_X, -1) K + (E + E^T) W          dk += dK-> + tril(B R_X, -1)^T W
//   dbeta = rowsum(R_W W + tril(R_X, -1) (W K^T) + dN (W W^T))
template <typename T>
void add_products_of_tile(const OwnTile<T>& t, const T* d_end, const T* d_end_columns, const T* d_g, const T* d_g_columns, T* ww, T* wk, T* e,
                          T* d_beta) {
  const int64_t m = t.padded_rows, stride = row_stride<T>(t.k_width), wide = padded<T>(t.k_width);
  const Panels<const T> w_rows = rows(t.w, stride);
  const Panels<T> dw = rows(t.dw, stride), dk = rows(t.dk, stride);
  multiply<T>(Into::kSubtract, m, wide, t.k_width, left(t.w, stride), rows(d_g, stride), rows(t.du, stride));
  multiply_lower<T>(Into::kSubtract, m, t.k_width, left(t.w, stride), columns(d_end_columns, t.k_width), t.dx, kTile);
  multiply_lower<T>(Into::kSet, m, t.k_width, left(t.w, stride), columns(t.w_columns, t.k_width), ww, kTile);
  multiply_lower<T>(Into::kSet, m, t.k_width, left(t.w, stride), columns(t.k_columns, t.k_width), wk, kTile);
  keep_lower(m, true, t.dx);
  solve_unit_lower_transposed(m, t.n, kTile, t.du, stride, wide);
  solve_unit_lower_transposed(m, t.n, kTile, t.dx, kTile, m);
  keep_lower(m, true, t.dx);
  for (int64_t i = 0; i < m; i += kBlock) {
    const Panels<T> to = rows(e + i * kTile, kTile);
    multiply<T>(Into::kSet, kBlock, i + kBlock, t.k_width, left<T>(t.du + i * stride, stride), columns(t.u_columns, t.k_width), to);
    multiply<T>(Into::kAdd, kBlock, i + kBlock, i + kBlock, left<T>(t.dx + i * kTile, kTile), columns(t.x_columns, m), to);
  }
  for (int64_t i = 0; i < m; ++i) {
    T *ei = e + i * kTile, *rx = t.dx + i * kTile;
    const T *ru = t.du + i * stride, *w = t.w + i * stride, b = t.beta[i];
    T sum = 0;
    for (int64_t c = 0; c < t.k_width; ++c) sum += ru[c] * w[c];
    for (int64_t j = 0; j < i; ++j) {
      sum += rx[j] * wk[i * kTile + j] - ei[j] * ww[i * kTile + j];
      ei[j] *= -b;
      rx[j] *= b;
    }
    for (int64_t j = i; j < m; ++j) ei[j] = 0;
    d_beta[i] = sum;
    T* dwi = t.dw + i * stride;
    for (int64_t c = 0; c < wide; ++c) dwi[c] += b * ru[c];
  }
  multiply<T>(Into::kSubtract, m, wide, t.k_width, left(t.u, stride), columns(d_g_columns, t.k_width), dw);
  lower_times<T>(Into::kSubtract, m, wide, t.x, rows(d_end, stride), dw);
  lower_times<T>(Into::kAdd, m, wide, t.dx, rows(t.k, stride), dw);
  lower_times<T>(Into::kAdd, m, wide, e, w_rows, dw);
  lower_transposed_times<T>(Into::kAdd, m, wide, e, w_rows, dw);
  lower_transposed_times<T>(Into::kAdd, m, wide, t.dx, w_rows, dk);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t c = 0; c < wide; ++c) t.dk[i * stride + c] += d_end[i * stride + c];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace pathattn::cpu
HWY_AFTER_NAMESPACE();

#endif
