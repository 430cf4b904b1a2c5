// What backward keeps of a unit and of a worker, and the order of its phases.
#pragma once

#include "kernels/cpu/layout.h"
#include "kernels/cpu/unit_workspace.h"

namespace pathattn::cpu {

inline constexpr int64_t kPlainBlock = 256;  // tokens whose pairs are one task, without w
// The same with w, at a level above 0.
inline int64_t block_tokens(int level) { return level == 1 ? 256 : 512; }
inline int64_t blocks_per_node(int level) { return node_tokens(level) / block_tokens(level); }

// Rows of K-wide arrays are row_stride apart; packed columns of 64 tokens follow one another. [group] arrays hold one query head after another.
template <typename T>
struct BackwardUnit {
  T *k = nullptr, *v = nullptr, *dv = nullptr;                   // rows; k only without w
  T *d_o = nullptr, *d_o_columns = nullptr;                      // [group]
  T *lse = nullptr, *delta = nullptr;                            // [group]; delta = rowsum(dO o) - d_lse
  T *q = nullptr, *dq = nullptr, *dk = nullptr;                  // Q<- and dQ<- [group], dK->: the gradients in the frame of the level at work
  T* q_columns = nullptr;                                        // [group], only without w
  T *u = nullptr, *x = nullptr, *n = nullptr;                    // of each tile
  T* keys[kMaxLevels] = {};                                      // K-> rows
  T *queries[kMaxLevels] = {}, *query_columns[kMaxLevels] = {};  // Q<- rows and packed columns [group], from level 1 on
  T *products[kMaxLevels] = {}, *d_products[kMaxLevels] = {};    // G of each node and its gradient
  T *moved = nullptr, *d_moved = nullptr;                        // keys carried further to a later node of their level, and their gradient
  T *between = nullptr, *shorter = nullptr;  // of each node: the product of those up to the one that its keys move to; all but the last
  T* d_between = nullptr;
  double *gate_sums, *gate_rests, *d_row_sums, *d_key_sums;  // [group][tokens]; the last two: sums of dS over keys, over queries
  int32_t* gate_cuts;

  BackwardUnit(Arena& arena, const Problem& p, bool has_w, int64_t longest) {
    const int64_t tiles = ceil_div(longest, kTile), tokens = tiles * kTile, group = p.query_heads / p.key_heads;
    const int64_t k_rows = tokens * row_stride<T>(p.key_width), v_rows = tokens * row_stride<T>(p.value_width);
    const int64_t k_columns = tokens * p.key_width, matrix = p.key_width * row_stride<T>(p.key_width);
    const int levels = num_levels(longest);
    v = arena.take<T>(v_rows);
    dv = arena.take<T>(v_rows);
    d_o = arena.take<T>(group * v_rows);
    d_o_columns = arena.take<T>(group * tokens * p.value_width);
    lse = arena.take<T>(group * tokens);
    delta = arena.take<T>(group * tokens);
    q = arena.take<T>(group * k_rows);
    dq = arena.take<T>(group * k_rows);
    dk = arena.take<T>(k_rows);
    if (has_w) {
      u = arena.take<T>(k_rows);
      x = arena.take<T>(tokens * kTile);
      n = arena.take<T>(tokens * kTile);
      for (int level = 0; level < levels; ++level) {
        keys[level] = arena.take<T>(k_rows);
        products[level] = arena.take<T>(nodes_at(longest, level) * matrix);
        d_products[level] = arena.take<T>(nodes_at(longest, level) * matrix);
        if (level == 0) continue;
        queries[level] = arena.take<T>(group * k_rows);
        query_columns[level] = arena.take<T>(group * k_columns);
      }
      if (levels > 1) {
        moved = arena.take<T>(k_rows);
        d_moved = arena.take<T>(k_rows);
        for (T** a : {&between, &shorter, &d_between}) *a = arena.take<T>(nodes_at(longest, 1) * matrix);
      }
    } else {
      k = arena.take<T>(k_rows);
      q_columns = arena.take<T>(group * k_columns);
    }
    for (double** sums : {&gate_sums, &gate_rests, &d_row_sums, &d_key_sums}) *sums = arena.take<double>(group * tokens);
    gate_cuts = arena.take<int32_t>(group * tokens);
  }
};

template <typename T>
struct BackwardScratch {
  T *scores, *d_scores;                                  // [kTile][kTile]
  T *row_gate, *beta, *d_beta, *d_lse;                   // [kTile]
  T *w, *w_columns, *k, *k_columns, *v_columns, *q, *o;  // a tile of inputs
  T *u_columns, *x_columns, *dk_columns;
  T *r, *d_r, *ww, *wk, *dx, *e;           // [kTile][kTile]
  T *du, *dw, *dq, *dk;                    // rows
  T *chain, *chain_columns;                // Q<- of a tile at the end of each earlier tile of its group
  T *matrix, *d_matrix, *suffix, *packed;  // K x K
  T* packed_products;                      // G^T of a group's tiles

  BackwardScratch(Arena& arena, const Problem& p) {
    const int64_t wide = std::max(row_stride<T>(p.key_width), row_stride<T>(p.value_width)), matrix_size = wide * round_up(wide, kMaxPanel);
    for (T** a : {&scores, &d_scores, &r, &d_r, &ww, &wk, &dx, &e, &x_columns}) *a = arena.take<T>(kTile * kTile);
    for (T** a : {&row_gate, &beta, &d_beta, &d_lse}) *a = arena.take<T>(kTile);
    for (T** a : {&w, &w_columns, &k, &k_columns, &v_columns, &q, &o, &u_columns, &dk_columns, &du, &dw, &dq, &dk, &chain_columns}) {
      *a = arena.take<T>(kTile * wide);
    }
    chain = arena.take<T>(kFan * kTile * wide);
    for (T** a : {&matrix, &d_matrix, &packed}) *a = arena.take<T>(matrix_size);
    suffix = arena.take<T>((kFan + 1) * matrix_size);
    packed_products = arena.take<T>(kFan * matrix_size);
  }
};

template <typename T>
using BackwardWorkspace = UnitWorkspace<BackwardUnit<T>, BackwardScratch<T>>;

// Phases of a unit. With w: kPrepare; kCarry at levels 1, 2, ...; then from the top level down to 1, for every distance between nodes of a group,
// the largest first: kBetween, as many kPairs as a node has blocks, and kBetweenBack (at distance 1 nothing lies between); then kPullBack; at
// last kGroups; kGates.
// Without w: kPrepare, kPairs for every distance between blocks, kTiles, kGates.
struct Phase {
  enum Kind { kPrepare, kCarry, kBetween, kPairs, kBetweenBack, kPullBack, kGroups, kTiles, kGates } kind;
  int level = 0;
  int64_t distance = 0, step = 0;
};

// The index-th phase, or with `index` beyond them the number of phases in `step`.
inline Phase phase_at(int64_t index, int64_t tokens, bool has_w, bool gated) {
  int64_t count = 0;
  const auto is = [&](int64_t phases) {
    const bool found = index >= count && index < count + phases;
    if (!found) count += phases;
    return found;
  };
  if (is(1)) return {Phase::kPrepare};
  if (has_w) {
    const int levels = num_levels(tokens);
    if (is(levels - 1)) return {Phase::kCarry, static_cast<int>(1 + index - count)};
    for (int level = levels - 1; level > 0; --level) {
      for (int64_t distance = std::min(group_nodes(tokens, level), nodes_at(tokens, level)) - 1; distance > 0; --distance) {
        if (distance > 1 && is(1)) return {Phase::kBetween, level, distance};
        if (is(blocks_per_node(level))) return {Phase::kPairs, level, distance, index - count};
        if (distance > 1 && is(1)) return {Phase::kBetweenBack, level, distance};
      }
      if (level > 1 && is(1)) return {Phase::kPullBack, level};
    }
    if (is(1)) return {Phase::kGroups};
  } else {
    if (is(ceil_div(tokens, kPlainBlock))) return {Phase::kPairs, 0, index - count};
    if (is(1)) return {Phase::kTiles};
  }
  if (gated && is(1)) return {Phase::kGates};
  return {Phase::kGates, -1, 0, count};
}

}  // namespace pathattn::cpu
