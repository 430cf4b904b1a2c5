// Tiles of queries against tiles of keys, scores transposed: a vector's lanes are queries, and walking over the keys breaks their sticks side by
// side.
//
// Backward walks a tile of queries twice. From the newest key to the oldest it keeps what is left before each tile of keys; from the oldest to the
// newest it then knows both the weights and what older keys hand on, with nothing ever subtracted from a sum:
//   g_ij = A_ij do_i v_j          dz_ij = (1 - sigmoid(z_ij)) g_ij - sigmoid(z_ij) (rest_i drest_i + sum over l < j of g_il)
#include "kernels/cpu/stick_breaking.h"

#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/stick_breaking.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/schedule.h"
#include "kernels/cpu/simd-inl.h"

#ifndef PATHATTN_CPU_STICK_BREAKING_WORKSPACE_
#define PATHATTN_CPU_STICK_BREAKING_WORKSPACE_
namespace pathattn::cpu {

// A head's tiles of queries are dealt out to so many tasks. In backward each task has its own sums of dk and dv, which are added up in the end.
inline constexpr int64_t kForwardStrips = 8, kBackwardStrips = 4;

// A tile of queries, prepared: scale * q, d_o, and both as packed columns.
template <typename T>
struct QueryTile {
  T *q, *q_columns, *d_o = nullptr, *d_o_columns = nullptr;

  QueryTile(Arena& arena, const Problem& p, bool backward) {
    q = arena.take<T>(kTile * row_stride<T>(p.key_width));
    q_columns = arena.take<T>(kTile * p.key_width);
    if (!backward) return;
    d_o = arena.take<T>(kTile * row_stride<T>(p.value_width));
    d_o_columns = arena.take<T>(kTile * p.value_width);
  }
};

template <typename T>
struct StickScratch {
  QueryTile<T> queries;
  T *k, *v;                         // a tile of keys
  T *scores, *weights, *d_weights;  // [keys][queries] of a pair of tiles; forward has weights in the place of scores
  T *rest, *older;                  // [queries] what is left; the sum over older keys
  T* result;                        // o or dq
  T* rests;                         // [tiles of keys][queries] what is left before each tile

  StickScratch(Arena& arena, const Problem& p, bool backward) : queries(arena, p, backward) {
    k = arena.take<T>(kTile * row_stride<T>(p.key_width));
    v = arena.take<T>(kTile * row_stride<T>(p.value_width));
    scores = weights = arena.take<T>(kTile * kTile);
    rest = arena.take<T>(kTile);
    result = arena.take<T>(kTile * row_stride<T>(backward ? p.key_width : p.value_width));
    d_weights = older = rests = nullptr;
    if (!backward) return;
    weights = arena.take<T>(kTile * kTile);
    d_weights = arena.take<T>(kTile * kTile);
    older = arena.take<T>(kTile);
    rests = arena.take<T>(ceil_div(longest_document(p), kTile) * kTile);
  }
};

template <typename T>
struct StickWorkspace {
  size_t bytes_of_scratch;
  char* scratches;
  T *dk = nullptr, *dv = nullptr;  // [strips][batch][key_heads][tokens] rows
  size_t used;

  StickWorkspace(void* memory, const Problem& p, bool backward, int num_workers) {
    Arena scratch(nullptr), all(memory);
    StickScratch<T>(scratch, p, backward);
    bytes_of_scratch = scratch.used();
    scratches = all.take<char>(num_workers * bytes_of_scratch);
    if (backward) {
      const int64_t rows = kBackwardStrips * p.batch * p.key_heads * p.tokens;
      dk = all.take<T>(rows * row_stride<T>(p.key_width));
      dv = all.take<T>(rows * row_stride<T>(p.value_width));
    }
    used = all.used();
  }
};

}  // namespace pathattn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu {
namespace HWY_NAMESPACE {

// sigmoid(z) and 1 - sigmoid(z), neither by a difference that would cost digits.
template <class D>
struct Shares {
  hn::Vec<D> smaller, taken, kept;
  hn::Mask<D> large;  // more is taken than kept

  HWY_INLINE Shares(D d, hn::Vec<D> z) : large(hn::Ge(z, hn::Zero(d))) {
    const auto e = exp(d, hn::Neg(hn::Abs(z)));
    const auto larger = hn::Div(hn::Set(d, hn::TFromD<D>(1)), hn::Add(hn::Set(d, hn::TFromD<D>(1)), e));
    smaller = hn::Mul(e, larger);
    taken = hn::IfThenElse(large, larger, smaller);
    kept = hn::IfThenElse(large, smaller, larger);
  }
};

// What is left of the sticks of a vector of queries. Thousands of small shares would all round the same way: `lost` is what rounding took.
template <class D>
struct Rest {
  hn::Vec<D> rest, lost;

  HWY_INLINE Rest(D d, const hn::TFromD<D>* from) : rest(hn::Load(d, from)), lost(hn::Zero(d)) {}
  // Takes a share off and returns its size, A.
  HWY_INLINE hn::Vec<D> take(const Shares<D>& shares) {
    const auto whole = hn::Add(rest, lost), weight = hn::Mul(shares.taken, whole), less = hn::Sub(rest, weight);
    lost = hn::IfThenElse(shares.large, hn::Sub(rest, rest), hn::Add(lost, hn::Sub(hn::Sub(rest, less), weight)));
    rest = hn::IfThenElse(shares.large, hn::Mul(shares.kept, whole), less);
    return weight;
  }
  // The same where `seen`; elsewhere nothing happens and A is 0.
  HWY_INLINE hn::Vec<D> take(const Shares<D>& shares, hn::Mask<D> seen) {
    const Rest before = *this;
    const auto weight = hn::IfThenElseZero(seen, take(shares));
    rest = hn::IfThenElse(seen, rest, before.rest);
    lost = hn::IfThenElse(seen, lost, before.lost);
    return weight;
  }
  HWY_INLINE hn::Vec<D> whole() const { return hn::Add(rest, lost); }
};

// Lanes whose query, `first_query` and on, comes after key j of the same tile.
template <class D>
HWY_INLINE hn::Mask<D> sees(D d, int64_t first_query, int64_t key) {
  using T = hn::TFromD<D>;
  return hn::Gt(hn::Iota(d, static_cast<T>(first_query)), hn::Set(d, static_cast<T>(key)));
}

// What n keys leave of `rest`; in the tile of the queries themselves (kOwn) a query sees only the keys before it. visit(place of the pair in a
// [keys][queries] tile, shares, weight).
template <bool kOwn, typename T, typename Visit>
HWY_INLINE void break_sticks(const T* scores, int64_t n, T* HWY_RESTRICT rest, Visit visit) {
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < kTile; i += static_cast<int64_t>(hn::Lanes(d))) {
    Rest left(d, rest + i);
    for (int64_t j = n - 1; j >= 0; --j) {
      const int64_t at = j * kTile + i;
      const Shares shares(d, hn::Load(d, scores + at));
      visit(at, shares, kOwn ? left.take(shares, sees(d, i, j)) : left.take(shares));
    }
    hn::Store(left.whole(), d, rest + i);
  }
}

template <typename T>
void leave(bool own, const T* scores, int64_t n, T* HWY_RESTRICT rest) {
  const auto nothing = [](auto...) {};
  own ? break_sticks<true>(scores, n, rest, nothing) : break_sticks<false>(scores, n, rest, nothing);
}

// Scores become weights.
template <typename T>
void weigh(bool own, T* scores, int64_t n, T* HWY_RESTRICT rest) {
  const hn::ScalableTag<T> d;
  const auto store = [=](int64_t at, const auto&, auto weight) { hn::Store(weight, d, scores + at); };
  own ? break_sticks<true>(scores, n, rest, store) : break_sticks<false>(scores, n, rest, store);
}

// Weights, and in place of the scores the smaller of sigmoid(z) and 1 - sigmoid(z), with a minus sign if it is the latter.
template <typename T>
void weigh_and_keep_shares(bool own, T* scores, int64_t n, T* HWY_RESTRICT rest, T* HWY_RESTRICT weights) {
  const hn::ScalableTag<T> d;
  const auto store = [=](int64_t at, const auto& shares, auto weight) {
    hn::Store(hn::IfThenElse(shares.large, hn::Neg(shares.smaller), shares.smaller), d, scores + at);
    hn::Store(weight, d, weights + at);
  };
  own ? break_sticks<true>(scores, n, rest, store) : break_sticks<false>(scores, n, rest, store);
}

// Shares become dz; `older` goes on from the sum over older keys.
template <bool kOwn, typename T>
void differentiate(T* HWY_RESTRICT shares, const T* HWY_RESTRICT weights, const T* HWY_RESTRICT d_weights, int64_t n, T* HWY_RESTRICT older) {
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < kTile; i += static_cast<int64_t>(hn::Lanes(d))) {
    auto sum = hn::Load(d, older + i);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t at = j * kTile + i;
      const auto product = hn::Mul(hn::Load(d, weights + at), hn::Load(d, d_weights + at));
      const auto share = hn::Load(d, shares + at), smaller = hn::Abs(share), larger = hn::Sub(hn::Set(d, T(1)), smaller);
      const auto taken = hn::IfNegativeThenElse(share, larger, smaller), kept = hn::IfNegativeThenElse(share, smaller, larger);
      const auto gradient = hn::NegMulAdd(taken, sum, hn::Mul(kept, product));
      hn::Store(kOwn ? hn::IfThenElseZero(sees(d, i, j), gradient) : gradient, d, shares + at);
      sum = hn::Add(sum, product);
    }
    hn::Store(sum, d, older + i);
  }
}

// What forward and backward have in common. `Arguments` is of either.
template <typename T, typename Arguments>
class StickWork {
 public:
  StickWork(const Arguments& arguments, void* workspace, bool backward, int num_workers)
      : a_(arguments), p_(arguments.problem), backward_(backward), memory_(workspace, p_, backward, num_workers) {}

 protected:
  StickScratch<T> scratch_of(int worker) const {
    Arena arena(memory_.scratches + worker * memory_.bytes_of_scratch);
    return StickScratch<T>(arena, p_, backward_);
  }
  static int64_t tile_size(const Unit& unit, int64_t tile) { return std::min(kTile, unit.tokens - tile * kTile); }

  void load_queries(const Unit& unit, int64_t head, int64_t tile, const QueryTile<T>& to) const {
    load_tile<T>(p_.dtype, a_.q, unit, head, tile * kTile, tile_size(unit, tile), p_.key_width, static_cast<T>(p_.scale), to.q, kTile);
    pack_columns(to.q, k_stride_, kTile, p_.key_width, to.q_columns);
  }
  // k, and scores = K (scale Q)^T.
  void score(const Unit& unit, int64_t tile, const StickScratch<T>& s) const {
    const int64_t n = tile_size(unit, tile);
    load_tile<T>(p_.dtype, a_.k, unit, unit.head, tile * kTile, n, p_.key_width, 1, s.k, n);
    multiply<T>(Into::kSet, n, kTile, p_.key_width, left<T>(s.k, k_stride_), columns<const T>(s.queries.q_columns, p_.key_width),
                rows(s.scores, kTile));
  }
  void load_values(const Unit& unit, int64_t tile, const StickScratch<T>& s) const {
    const int64_t n = tile_size(unit, tile);
    load_tile<T>(p_.dtype, a_.v, unit, unit.head, tile * kTile, n, p_.value_width, 1, s.v, n);
  }

  const Arguments& a_;
  const Problem& p_;
  const bool backward_;
  const int64_t group_ = p_.query_heads / p_.key_heads, k_stride_ = row_stride<T>(p_.key_width), v_stride_ = row_stride<T>(p_.value_width);
  const StickWorkspace<T> memory_;
};

template <typename T>
class StickForward : StickWork<T, StickBreakingForwardArguments> {
  using Work = StickWork<T, StickBreakingForwardArguments>;
  using Work::a_, Work::p_, Work::group_, Work::v_stride_;

 public:
  StickForward(const StickBreakingForwardArguments& arguments, void* workspace, int num_workers)
      : Work(arguments, workspace, /*backward=*/false, num_workers) {}

  void run(const Executor& executor) const {
    const int64_t tasks_of_unit = group_ * kForwardStrips;
    share_out(executor, num_units(p_) * tasks_of_unit, [&](int64_t task, int worker, int64_t) {
      const Unit unit = unit_at(p_, task / tasks_of_unit);
      const int64_t member = task % tasks_of_unit / kForwardStrips;
      for (int64_t tile = task % kForwardStrips; tile < unit.tiles; tile += kForwardStrips) {
        attend(unit, unit.head * group_ + member, tile, this->scratch_of(worker));
      }
    });
  }

 private:
  void attend(const Unit& unit, int64_t head, int64_t tile, const StickScratch<T>& s) const {
    const int64_t m = this->tile_size(unit, tile), o_width = padded<T>(p_.value_width);
    this->load_queries(unit, head, tile, s.queries);
    std::fill_n(s.rest, kTile, T(1));
    std::memset(s.result, 0, kTile * v_stride_ * sizeof(T));
    for (int64_t other = tile; other >= 0; --other) {
      const int64_t n = this->tile_size(unit, other);
      this->score(unit, other, s);
      this->load_values(unit, other, s);
      weigh(other == tile, s.scores, n, s.rest);
      multiply<T>(Into::kAdd, m, o_width, n, transposed<T>(s.weights, kTile), rows<const T>(s.v, v_stride_), rows(s.result, v_stride_));
    }
    store_tile(
        p_.dtype, s.result, m, p_.value_width, [](int64_t) { return T(1); }, a_.o, unit, head, tile * kTile);
    T* rest = element<T>(a_.rest, unit, head, tile * kTile);
    for (int64_t i = 0; i < m; ++i) rest[i * a_.rest.token_stride] = s.rest[i];
  }
};

template <typename T>
class StickBackward : StickWork<T, StickBreakingBackwardArguments> {
  using Work = StickWork<T, StickBreakingBackwardArguments>;
  using Work::a_, Work::p_, Work::group_, Work::k_stride_, Work::v_stride_, Work::memory_;

 public:
  StickBackward(const StickBreakingBackwardArguments& arguments, void* workspace, int num_workers)
      : Work(arguments, workspace, /*backward=*/true, num_workers) {}

  void run(const Executor& executor) const {
    share_out(executor, num_units(p_) * kBackwardStrips, [&](int64_t task, int worker, int64_t) {
      const Unit unit = unit_at(p_, task / kBackwardStrips);
      const int64_t strip = task % kBackwardStrips;
      std::memset(dk_of(strip, unit.batch, unit.head, unit.first), 0, unit.tokens * k_stride_ * sizeof(T));
      std::memset(dv_of(strip, unit.batch, unit.head, unit.first), 0, unit.tokens * v_stride_ * sizeof(T));
      for (int64_t tile = strip; tile < unit.tiles; tile += kBackwardStrips) {
        for (int64_t member = 0; member < group_; ++member) gradients(unit, unit.head * group_ + member, tile, strip, this->scratch_of(worker));
      }
    });
    const int64_t blocks = ceil_div(p_.tokens, kTile);
    share_out(executor, p_.batch * p_.key_heads * blocks, [&](int64_t task, int, int64_t) {
      const int64_t b = task / blocks / p_.key_heads, head = task / blocks % p_.key_heads, first = task % blocks * kTile;
      const Unit all{b, 0, p_.tokens, blocks, head};
      const int64_t m = std::min(kTile, p_.tokens - first);
      const auto unchanged = [](int64_t) { return T(1); };
      for (int64_t strip = 1; strip < kBackwardStrips; ++strip) {
        add(dk_of(strip, b, head, first), m * k_stride_, dk_of(0, b, head, first));
        add(dv_of(strip, b, head, first), m * v_stride_, dv_of(0, b, head, first));
      }
      store_tile(p_.dtype, dk_of(0, b, head, first), m, p_.key_width, unchanged, a_.dk, all, head, first);
      store_tile(p_.dtype, dv_of(0, b, head, first), m, p_.value_width, unchanged, a_.dv, all, head, first);
    });
  }

 private:
  T* dk_of(int64_t strip, int64_t b, int64_t head, int64_t token) const { return memory_.dk + row_of(strip, b, head, token) * k_stride_; }
  T* dv_of(int64_t strip, int64_t b, int64_t head, int64_t token) const { return memory_.dv + row_of(strip, b, head, token) * v_stride_; }
  int64_t row_of(int64_t strip, int64_t b, int64_t head, int64_t token) const {
    return ((strip * p_.batch + b) * p_.key_heads + head) * p_.tokens + token;
  }
  static void add(const T* HWY_RESTRICT from, int64_t count, T* HWY_RESTRICT to) {
    for (int64_t c = 0; c < count; ++c) to[c] += from[c];
  }

  void gradients(const Unit& unit, int64_t head, int64_t tile, int64_t strip, const StickScratch<T>& s) const {
    const int64_t m = this->tile_size(unit, tile), k_width = padded<T>(p_.key_width), v_width = padded<T>(p_.value_width);
    this->load_queries(unit, head, tile, s.queries);
    load_tile<T>(p_.dtype, a_.d_o, unit, head, tile * kTile, m, p_.value_width, 1, s.queries.d_o, kTile);
    pack_columns(s.queries.d_o, v_stride_, kTile, p_.value_width, s.queries.d_o_columns);

    std::fill_n(s.rest, kTile, T(1));
    for (int64_t other = tile; other >= 0; --other) {
      std::copy_n(s.rest, kTile, s.rests + other * kTile);
      this->score(unit, other, s);
      leave(other == tile, s.scores, this->tile_size(unit, other), s.rest);
    }

    std::fill_n(s.older, kTile, T(0));
    if (a_.d_rest.data) {
      const T* d_rest = element<T>(a_.d_rest, unit, head, tile * kTile);
      for (int64_t i = 0; i < m; ++i) s.older[i] = s.rest[i] * d_rest[i * a_.d_rest.token_stride];
    }
    std::memset(s.result, 0, kTile * k_stride_ * sizeof(T));
    for (int64_t other = 0; other <= tile; ++other) {
      const int64_t n = this->tile_size(unit, other), first = unit.first + other * kTile;
      this->score(unit, other, s);
      this->load_values(unit, other, s);
      weigh_and_keep_shares(other == tile, s.scores, n, s.rests + other * kTile, s.weights);
      multiply<T>(Into::kSet, n, kTile, p_.value_width, left<T>(s.v, v_stride_), columns<const T>(s.queries.d_o_columns, p_.value_width),
                  rows(s.d_weights, kTile));
      other == tile ? differentiate<true>(s.scores, s.weights, s.d_weights, n, s.older)
                    : differentiate<false>(s.scores, s.weights, s.d_weights, n, s.older);
      multiply<T>(Into::kAdd, m, k_width, n, transposed<T>(s.scores, kTile), rows<const T>(s.k, k_stride_), rows(s.result, k_stride_));
      multiply<T>(Into::kAdd, n, k_width, m, left<T>(s.scores, kTile), rows<const T>(s.queries.q, k_stride_),
                  rows(dk_of(strip, unit.batch, unit.head, first), k_stride_));
      multiply<T>(Into::kAdd, n, v_width, m, left<T>(s.weights, kTile), rows<const T>(s.queries.d_o, v_stride_),
                  rows(dv_of(strip, unit.batch, unit.head, first), v_stride_));
    }
    store_tile(
        p_.dtype, s.result, m, p_.key_width, [&](int64_t) { return static_cast<T>(p_.scale); }, a_.dq, unit, head, tile * kTile);
  }
};

void stick_forward_float32(const StickBreakingForwardArguments& arguments, void* workspace, const Executor& executor) {
  StickForward<float>(arguments, workspace, executor.num_workers).run(executor);
}
void stick_forward_float64(const StickBreakingForwardArguments& arguments, void* workspace, const Executor& executor) {
  StickForward<double>(arguments, workspace, executor.num_workers).run(executor);
}
void stick_backward_float32(const StickBreakingBackwardArguments& arguments, void* workspace, const Executor& executor) {
  StickBackward<float>(arguments, workspace, executor.num_workers).run(executor);
}
void stick_backward_float64(const StickBreakingBackwardArguments& arguments, void* workspace, const Executor& executor) {
  StickBackward<double>(arguments, workspace, executor.num_workers).run(executor);
}

}  // namespace HWY_NAMESPACE
}  // namespace pathattn::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pathattn::cpu {

HWY_EXPORT(stick_forward_float32);
HWY_EXPORT(stick_forward_float64);
HWY_EXPORT(stick_backward_float32);
HWY_EXPORT(stick_backward_float64);

namespace {

size_t workspace_size(const Problem& p, bool backward, int num_workers) {
  if (!check(p).ok()) return 0;
  return p.dtype == DType::kFloat64 ? StickWorkspace<double>(nullptr, p, backward, num_workers).used
                                    : StickWorkspace<float>(nullptr, p, backward, num_workers).used;
}

}  // namespace

size_t stick_breaking_forward_workspace_size(const Problem& p, int num_workers) { return workspace_size(p, false, num_workers); }
size_t stick_breaking_backward_workspace_size(const Problem& p, int num_workers) { return workspace_size(p, true, num_workers); }

Status stick_breaking_forward(const StickBreakingForwardArguments& arguments, void* workspace, const Executor& executor) {
  if (const Status status = check(arguments); !status.ok()) return status;
  if (arguments.problem.batch * arguments.problem.tokens == 0) return {};
  if (arguments.problem.dtype == DType::kFloat64) {
    HWY_DYNAMIC_DISPATCH(stick_forward_float64)(arguments, workspace, executor);
  } else {
    HWY_DYNAMIC_DISPATCH(stick_forward_float32)(arguments, workspace, executor);
  }
  return {};
}

Status stick_breaking_backward(const StickBreakingBackwardArguments& arguments, void* workspace, const Executor& executor) {
  if (const Status status = check(arguments); !status.ok()) return status;
  if (arguments.problem.batch * arguments.problem.tokens == 0) return {};
  if (arguments.problem.dtype == DType::kFloat64) {
    HWY_DYNAMIC_DISPATCH(stick_backward_float64)(arguments, workspace, executor);
  } else {
    HWY_DYNAMIC_DISPATCH(stick_backward_float32)(arguments, workspace, executor);
  }
  return {};
}

}  // namespace pathattn::cpu
#endif
