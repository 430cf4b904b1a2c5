// Forward: prepare each unit's keys (a linear pass), then every tile of queries walks leftwards over them. docs/cpu-kernels.md explains.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/forward.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/schedule.h"
#include "kernels/cpu/softmax-inl.h"
#include "kernels/cpu/unit_workspace.h"

#ifndef PATHATTN_CPU_FORWARD_WORKSPACE_
#define PATHATTN_CPU_FORWARD_WORKSPACE_
namespace pathattn::cpu {

inline constexpr int64_t kKeyBlock = 128;  // keys whose scores are turned into weights together

// What a unit's tiles of queries read. Rows are row_stride apart, tiles of packed columns follow one another.
template <typename T>
struct PreparedUnit {
  T* v;                                                // [tokens] rows
  T* keys[kMaxLevels] = {};                            // (K->)^T to the end of a node of each level, packed columns; without w only level 0: K^T
  T* products[kMaxLevels] = {};                        // G of each node, [nodes][K] rows
  T *w_columns = nullptr, *u = nullptr, *x = nullptr;  // of each tile: W^T, U, X [kTile][kTile]
  double *gate_sums, *gate_rests;                      // [group][tokens]
  int32_t* gate_cuts;

  PreparedUnit(Arena& arena, const Problem& p, bool has_w, int64_t longest) {
    const int64_t tiles = ceil_div(longest, kTile), tokens = tiles * kTile;
    const int64_t k_stride = row_stride<T>(p.key_width), group = p.query_heads / p.key_heads;
    v = arena.take<T>(tokens * row_stride<T>(p.value_width));
    keys[0] = arena.take<T>(tokens * p.key_width);
    if (has_w) {
      products[0] = arena.take<T>(tiles * p.key_width * k_stride);
      for (int level = 1; level < num_levels(longest); ++level) {
        keys[level] = arena.take<T>(tokens * p.key_width);
        products[level] = arena.take<T>(longest / node_tokens(level) * p.key_width * k_stride);
      }
      w_columns = arena.take<T>(tokens * p.key_width);
      u = arena.take<T>(tokens * k_stride);
      x = arena.take<T>(tokens * kTile);
    }
    gate_sums = arena.take<double>(group * tokens);
    gate_rests = arena.take<double>(group * tokens);
    gate_cuts = arena.take<int32_t>(group * tokens);
  }
};

template <typename T>
struct ForwardScratch {
  T *w, *beta, *n, *suffix;                         // preparing
  T *q, *q_next, *scores, *r, *o, *highest, *sums;  // a tile of queries
  T *row_gate, *key_gate;

  ForwardScratch(Arena& arena, const Problem& p) {
    const int64_t k_stride = row_stride<T>(p.key_width);
    w = arena.take<T>(kTile * k_stride);
    beta = arena.take<T>(kTile);
    n = arena.take<T>(kTile * kTile);
    suffix = arena.take<T>(2 * p.key_width * k_stride);
    q = arena.take<T>(kTile * k_stride);
    q_next = arena.take<T>(kTile * k_stride);
    scores = arena.take<T>(kTile * row_stride<T>(kKeyBlock));
    r = arena.take<T>(2 * kTile * kTile);
    o = arena.take<T>(kTile * row_stride<T>(p.value_width));
    highest = arena.take<T>(kTile);
    sums = arena.take<T>(kTile * kAlignment / sizeof(T));
    row_gate = arena.take<T>(kTile);
    key_gate = arena.take<T>(kKeyBlock);
  }
};

template <typename T>
using ForwardWorkspace = UnitWorkspace<PreparedUnit<T>, ForwardScratch<T>>;

}  // namespace pathattn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu {
namespace HWY_NAMESPACE {

template <typename T>
class ForwardWork {
 public:
  ForwardWork(const ForwardArguments& arguments, void* workspace, int num_workers)
      : a_(arguments), p_(arguments.problem), has_w_(arguments.w.data), gated_(arguments.g.data), memory_(workspace, p_, has_w_, num_workers) {}

  double cost(int64_t unit) const { return unit_cost(p_, unit); }
  void open(int64_t unit, int64_t slot) { memory_.units[slot] = unit_at(p_, unit); }
  int num_phases(int64_t slot) const { return has_w_ ? 1 + num_levels(memory_.units[slot].tokens) : 2; }
  int64_t num_tasks(int64_t slot, int phase) const {
    const Unit& unit = memory_.units[slot];
    if (phase == num_phases(slot) - 1) return unit.tiles * group_;
    if (phase == 0) return unit.tiles + (gated_ ? group_ : 0);
    return full_nodes(unit, phase);
  }
  void run(int64_t slot, int phase, int64_t task, int worker) {
    const Unit& unit = memory_.units[slot];
    Arena of_slot(memory_.slots + slot * memory_.bytes_of_slot), of_worker(memory_.scratches + worker * memory_.bytes_of_scratch);
    const PreparedUnit<T> prepared(of_slot, p_, has_w_, memory_.longest);
    const ForwardScratch<T> scratch(of_worker, p_);
    if (phase == num_phases(slot) - 1) {
      attend(unit, prepared, scratch, task % group_, unit.tiles - 1 - task / group_);
    } else if (phase > 0) {
      carry_node(prepared, scratch, phase, task);
    } else if (task < unit.tiles) {
      prepare(unit, prepared, scratch, task);
    } else {
      const int64_t member = task - unit.tiles;
      sum_gates(element<T>(a_.g, unit, unit.head * group_ + member, 0), a_.g.token_stride, unit.tokens, p_.gate_scaled ? p_.scale : 1,
                gates(unit, prepared, member));
    }
  }

 private:
  // Nodes of a level that some later node reads: all but the last, and these are whole.
  static int64_t full_nodes(const Unit& unit, int level) { return std::max<int64_t>(0, nodes_at(unit.tokens, level) - 1); }

  Gates gates(const Unit& unit, const PreparedUnit<T>& prepared, int64_t member) const {
    if (!gated_) return {};
    const int64_t offset = member * unit.tokens;
    return {prepared.gate_sums + offset, prepared.gate_rests + offset, prepared.gate_cuts + offset};
  }

  void prepare(const Unit& unit, const PreparedUnit<T>& to, const ForwardScratch<T>& s, int64_t tile) const {
    const int64_t first = tile * kTile, m = std::min(kTile, unit.tokens - first), padded_rows = round_up(m, kBlock), width = p_.key_width;
    load_tile<T>(p_.dtype, a_.v, unit, unit.head, first, m, p_.value_width, 1, to.v + first * v_stride_, padded_rows);
    load_tile<T>(p_.dtype, a_.k, unit, unit.head, first, m, width, 1, s.q, padded_rows);
    pack_columns(s.q, k_stride_, padded_rows, width, to.keys[0] + first * width);
    if (!has_w_) return;
    load_tile<T>(kCompute, a_.w, unit, unit.head, first, m, width, 1, s.w, padded_rows);
    load_rows<T>(element<T>(a_.beta, unit, unit.head, first), kCompute, a_.beta.token_stride, m, 1, 1, s.beta, 1, padded_rows, 1);
    prepare_tile(Tile<T>{padded_rows, width, k_stride_, s.w, s.beta, to.w_columns + first * width, to.keys[0] + first * width, s.n,
                         to.x + first * kTile, to.u + first * k_stride_, product(to, 0, tile)});
  }

  T* product(const PreparedUnit<T>& prepared, int level, int64_t node) const { return prepared.products[level] + node * p_.key_width * k_stride_; }

  void carry_node(const PreparedUnit<T>& to, const ForwardScratch<T>& s, int level, int64_t node) const {
    Suffix<T> suffix(p_.key_width, s.suffix);
    for (int64_t child = (node + 1) * kFan - 1; child >= node * kFan; --child) {
      const int64_t tokens = node_tokens(level - 1), offset = child * tokens * p_.key_width;
      suffix.carry(to.keys[level - 1] + offset, to.keys[level] + offset, tokens);
      suffix.append(product(to, level - 1, child));
    }
    std::memcpy(product(to, level, node), suffix.product(), p_.key_width * k_stride_ * sizeof(T));
  }

  void attend(const Unit& unit, const PreparedUnit<T>& from, const ForwardScratch<T>& s, int64_t member, int64_t tile) const {
    const int64_t first = tile * kTile, m = std::min(kTile, unit.tokens - first), head = unit.head * group_ + member;
    const Gates gates = this->gates(unit, from, member);
    const Softmax<T> softmax{s.highest, s.sums, s.o, v_stride_, padded<T>(p_.value_width)};
    T *q = s.q, *q_next = s.q_next;
    load_tile<T>(p_.dtype, a_.q, unit, head, first, m, p_.key_width, static_cast<T>(p_.scale), q, m);
    softmax.reset(m);
    own_tile(from, s, softmax, gates, q, first, m);
    if (gated_ && first > 0) gates_of_rows(gates, first, m, s.row_gate);
    if (!has_w_) {
      attend_keys(from, s, softmax, gates, q, first, m, 0, 0, first);
    } else {
      // At each level the node meets its earlier siblings, which takes it to the start of its parent.
      int64_t node = tile;
      for (int level = 0; node > 0; ++level) {
        const int64_t group = group_nodes(unit.tokens, level), parent = node / group;
        for (int64_t other = node - 1; other >= parent * group; --other) {
          attend_keys(from, s, softmax, gates, q, first, m, level, other * node_tokens(level), node_tokens(level));
          if (other == 0) break;
          multiply<T>(Into::kSet, m, padded<T>(p_.key_width), p_.key_width, left<T>(q, k_stride_),
                      rows<const T>(product(from, level, other), k_stride_), rows(q_next, k_stride_));
          std::swap(q, q_next);
        }
        node = parent;
      }
    }
    const auto normalise = [&](int64_t i) { return T(1) / softmax.sum(i); };
    store_tile(p_.dtype, s.o, m, p_.value_width, normalise, a_.o, unit, head, first);
    T* lse = element<T>(a_.lse, unit, head, first);
    for (int64_t i = 0; i < m; ++i) lse[i * a_.lse.token_stride] = softmax.highest[i] + std::log(softmax.sum(i));
  }

  // The tile's own keys, j <= i; with w, q is then carried to the tile's start:
  //   scores = Q (K->)^T + triu(Q W^T, 1) X        q = Q - tril(Q W^T) U
  void own_tile(const PreparedUnit<T>& from, const ForwardScratch<T>& s, const Softmax<T>& softmax, const Gates& gates, T* q, int64_t first,
                int64_t m) const {
    const int64_t width = p_.key_width, stride = row_stride<T>(kKeyBlock), padded_rows = round_up(m, kBlock);
    const T* x = from.x + first * kTile;
    T *r_upper = s.r, *r_lower = s.r + kTile * kTile;
    multiply_lower<T>(Into::kSet, m, width, left<T>(q, k_stride_), columns<const T>(from.keys[0] + first * width, width), s.scores, stride);
    if (has_w_) {
      multiply<T>(Into::kSet, m, padded_rows, width, left<T>(q, k_stride_), columns<const T>(from.w_columns + first * width, width),
                  rows(r_upper, kTile));
      for (int64_t i = 0; i < m; ++i) {
        T *upper = r_upper + i * kTile, *lower = r_lower + i * kTile;
        for (int64_t j = 0; j < padded_rows; ++j) {
          lower[j] = j <= i ? upper[j] : T(0);
          upper[j] = j <= i ? T(0) : upper[j];
        }
      }
    }
    for (int64_t i = 0; i < m; i += kBlock) {
      const int64_t block = std::min(kBlock, m - i), columns = i + kBlock;
      if (has_w_) {
        multiply<T>(Into::kAdd, block, columns, padded_rows - i, left<T>(r_upper + i * kTile + i, kTile), rows<const T>(x + i * kTile, kTile),
                    rows(s.scores + i * stride, stride));
        multiply<T>(Into::kSubtract, block, padded<T>(width), columns, left<T>(r_lower + i * kTile, kTile),
                    rows<const T>(from.u + first * k_stride_, k_stride_), rows(q + i * k_stride_, k_stride_));
      }
      for (int64_t row = i; row < i + block; ++row) {
        T* scores = s.scores + row * stride;
        if (gated_) {
          gates_of_own_keys(gates, first, row, s.key_gate);
          for (int64_t j = 0; j <= row; ++j) scores[j] += s.key_gate[j];
        }
        for (int64_t j = row + 1; j < columns; ++j) scores[j] = -kInfinity<T>;
        softmax.template row<false>(row, scores, columns, 0, nullptr);
      }
      multiply<T>(Into::kAdd, block, softmax.o_width, columns, left<T>(s.scores + i * stride, stride),
                  rows<const T>(from.v + first * v_stride_, v_stride_), rows(s.o + i * v_stride_, v_stride_));
    }
  }

  // Keys [begin, begin + count) of a node that the rows q have been carried to the end of.
  void attend_keys(const PreparedUnit<T>& from, const ForwardScratch<T>& s, const Softmax<T>& softmax, const Gates& gates, const T* q, int64_t first,
                   int64_t m, int level, int64_t begin, int64_t count) const {
    const int64_t stride = row_stride<T>(kKeyBlock);
    for (int64_t key = begin + count; key > begin;) {
      const int64_t n = std::min(kKeyBlock, key - begin);
      key -= n;
      multiply<T>(Into::kSet, m, n, p_.key_width, left(q, k_stride_), columns<const T>(from.keys[level] + key * p_.key_width, p_.key_width),
                  rows(s.scores, stride));
      if (gated_) {
        gates_of_keys(gates, first, key, n, s.key_gate);
        for (int64_t i = 0; i < m; ++i) softmax.template row<true>(i, s.scores + i * stride, n, s.row_gate[i], s.key_gate);
      } else {
        for (int64_t i = 0; i < m; ++i) softmax.template row<false>(i, s.scores + i * stride, n, 0, nullptr);
      }
      multiply<T>(Into::kAdd, m, softmax.o_width, n, left<T>(s.scores, stride), rows<const T>(from.v + key * v_stride_, v_stride_),
                  rows(s.o, v_stride_));
    }
  }

  static constexpr DType kCompute = kDTypeOf<T>;

  const ForwardArguments& a_;
  const Problem& p_;
  const bool has_w_, gated_;
  const int64_t group_ = p_.query_heads / p_.key_heads, k_stride_ = row_stride<T>(p_.key_width), v_stride_ = row_stride<T>(p_.value_width);
  const ForwardWorkspace<T> memory_;
};

template <typename T>
void forward_as(const ForwardArguments& arguments, void* workspace, const Executor& executor) {
  ForwardWork<T> work(arguments, workspace, executor.num_workers);
  run_units(executor, num_units(arguments.problem), work);
}
void forward_float32(const ForwardArguments& arguments, void* workspace, const Executor& executor) {
  forward_as<float>(arguments, workspace, executor);
}
void forward_float64(const ForwardArguments& arguments, void* workspace, const Executor& executor) {
  forward_as<double>(arguments, workspace, executor);
}

}  // namespace HWY_NAMESPACE
}  // namespace pathattn::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pathattn::cpu {

HWY_EXPORT(forward_float32);
HWY_EXPORT(forward_float64);

size_t forward_workspace_size(const Problem& p, bool has_w, int num_workers) {
  if (!check(p).ok()) return 0;
  return p.dtype == DType::kFloat64 ? ForwardWorkspace<double>(nullptr, p, has_w, num_workers).used
                                    : ForwardWorkspace<float>(nullptr, p, has_w, num_workers).used;
}

Status forward(const ForwardArguments& arguments, void* workspace, const Executor& executor) {
  if (const Status status = check(arguments); !status.ok()) return status;
  if (arguments.problem.batch * arguments.problem.tokens == 0) return {};
  if (arguments.problem.dtype == DType::kFloat64) {
    HWY_DYNAMIC_DISPATCH(forward_float64)(arguments, workspace, executor);
  } else {
    HWY_DYNAMIC_DISPATCH(forward_float32)(arguments, workspace, executor);
  }
  return {};
}

}  // namespace pathattn::cpu
#endif
