// Gates as sums that can be subtracted safely, and the softmax of a block of scores.

#if defined(PATHATTN_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PATHATTN_CPU_SOFTMAX_INL_H_
#undef PATHATTN_CPU_SOFTMAX_INL_H_
#else
#define PATHATTN_CPU_SOFTMAX_INL_H_
#endif

#include "kernels/cpu/prepare-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu {
namespace HWY_NAMESPACE {

// Gates of one query head of a document. sums[i] = g_0 + ... + g_i in float64, and what its rounding lost, for float64 results, in rests[i].
// A gate below kCut closes for good: it is left out of the sums (they would lose all digits), and cuts[i], the last such token up to i, says
// which keys row i no longer sees: those before it.
struct Gates {
  double *sums = nullptr, *rests = nullptr;  // [tokens], null without gate
  int32_t* cuts = nullptr;
};
inline constexpr double kCut = -1e6;

template <typename T>
void sum_gates(const T* g, int64_t stride, int64_t tokens, double factor, const Gates& gates) {
  double sum = 0, rest = 0;
  int32_t cut = 0;
  for (int64_t i = 0; i < tokens; ++i) {
    const double gate = static_cast<double>(g[i * stride]) * factor;
    if (gate < kCut) {
      cut = static_cast<int32_t>(i);
    } else {
      const double next = sum + gate, added = next - sum;
      rest += (sum - (next - added)) + (gate - added);
      sum = next;
    }
    gates.sums[i] = sum;
    gates.rests[i] = rest;
    gates.cuts[i] = cut;
  }
}

// to[j] = sum of the gates after token `key + j` up to token `row`, for j < count.
template <typename T>
void gates_between(const Gates& gates, int64_t row, int64_t key, int64_t count, T* HWY_RESTRICT to) {
  const double sum = gates.sums[row], rest = gates.rests[row];
  const double* HWY_RESTRICT sums = gates.sums + key;
  const double* HWY_RESTRICT rests = gates.rests + key;
  for (int64_t j = 0; j < count; ++j) {
    double gate = sum - sums[j];
    if (sizeof(T) == 8) gate += rest - rests[j];
    to[j] = static_cast<T>(gate);
  }
}

// For rows [first, first + m) of a document and keys before them, the gate of a pair is row_gate[i] + key_gate[j], both <= 0 and -inf where
// nothing passes.
template <typename T>
void gates_of_rows(const Gates& gates, int64_t first, int64_t m, T* row_gate) {
  gates_between(gates, first, first, m, row_gate);
  for (int64_t i = 0; i < m; ++i) row_gate[i] = gates.cuts[first + i] >= first ? -kInfinity<T> : -row_gate[i];
}
template <typename T>
void gates_of_keys(const Gates& gates, int64_t first, int64_t first_key, int64_t num_keys, T* HWY_RESTRICT key_gate) {
  gates_between(gates, first, first_key, num_keys, key_gate);
  const int64_t closed = std::min<int64_t>(gates.cuts[first - 1] - first_key, num_keys);
  for (int64_t j = 0; j < closed; ++j) key_gate[j] = -kInfinity<T>;
}
// The same inside a tile that starts at `first`, exactly, for its row i and keys j <= i.
template <typename T>
void gates_of_own_keys(const Gates& gates, int64_t first, int64_t i, T* key_gate) {
  gates_between(gates, first + i, first, i + 1, key_gate);
  const int64_t closed = gates.cuts[first + i] - first;
  for (int64_t j = 0; j < closed; ++j) key_gate[j] = -kInfinity<T>;
}

// Running softmax of a tile's rows over blocks of keys: weights are relative to the largest score so far.
template <typename T>
struct Softmax {
  T* highest;  // [kTile]
  T* sums;     // [kTile][lanes of a vector]
  T* o;        // [kTile][o_stride] weighted sum of values so far
  int64_t o_stride, o_width;

  void reset(int64_t m) const {
    const hn::ScalableTag<T> d;
    for (int64_t i = 0; i < m; ++i) {
      highest[i] = -kInfinity<T>;
      hn::Store(hn::Zero(d), d, sums + i * static_cast<int64_t>(hn::Lanes(d)));
      std::memset(o + i * o_stride, 0, o_width * sizeof(T));
    }
  }

  // Turns row i's scores of n keys (whole vectors) into weights. Not all of a row's scores so far may be -inf.
  template <bool kGated>
  HWY_INLINE void row(int64_t i, T* HWY_RESTRICT scores, int64_t n, T row_gate, const T* HWY_RESTRICT key_gate) const {
    const hn::ScalableTag<T> d;
    constexpr int64_t kLanes = hn::MaxLanes(d);
    if (kGated && row_gate == -kInfinity<T>) {
      std::memset(scores, 0, n * sizeof(T));
      return;
    }
    auto most = hn::Set(d, -kInfinity<T>);
    for (int64_t j = 0; j < n; j += kLanes) {
      auto s = hn::Load(d, scores + j);
      if (kGated) {
        s = hn::Add(s, hn::Load(d, key_gate + j));
        hn::Store(s, d, scores + j);
      }
      most = hn::Max(most, s);
    }
    T top = hn::GetLane(hn::MaxOfLanes(d, most)) + (kGated ? row_gate : T(0));
    T* sum_at = sums + i * kLanes;
    auto sum = hn::Load(d, sum_at);
    if (top > highest[i]) {
      const T shrink = hn::GetLane(exp(d, hn::Set(d, highest[i] - top)));
      sum = hn::Mul(sum, hn::Set(d, shrink));
      scale_row(o + i * o_stride, o_width, shrink);
      highest[i] = top;
    } else {
      top = highest[i];
    }
    const auto offset = hn::Set(d, kGated ? top - row_gate : top);
    auto block_sum = hn::Zero(d);  // apart from the long sum: many equal weights added to it one by one would all round the same way
    for (int64_t j = 0; j < n; j += kLanes) {
      const auto p = exp(d, hn::Sub(hn::Load(d, scores + j), offset));
      block_sum = hn::Add(block_sum, p);
      hn::Store(p, d, scores + j);
    }
    hn::Store(hn::Add(sum, block_sum), d, sum_at);
  }

  T sum(int64_t i) const {
    const hn::ScalableTag<T> d;
    return hn::GetLane(hn::SumOfLanes(d, hn::Load(d, sums + i * static_cast<int64_t>(hn::Lanes(d)))));
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace pathattn::cpu
HWY_AFTER_NAMESPACE();

#endif
