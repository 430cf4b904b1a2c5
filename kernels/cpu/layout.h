// How tokens are cut, and how workspaces are laid out: the same for every instruction set and any number of workers.
//
// A unit is one key head of one document. Its tokens form tiles of kTile, the nodes of level 0; kFan nodes of a level form one of the next, up to a
// level of at most kFan nodes or the last of kMaxLevels, which has as many as it takes. A node's G is its product of H, newest factor first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/problem.h"

namespace pathattn::cpu {

inline constexpr int64_t kTile = 64;
inline constexpr int64_t kFan = 8;
inline constexpr int kMaxLevels = 3;  // a node of the last is so long that what a product with its G costs a query is next to nothing
inline constexpr size_t kAlignment = 64;
inline constexpr int64_t kMaxPanel = 32;  // packed columns come in panels of at most this many

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
inline constexpr int64_t node_tokens(int level) { return kTile << (3 * level); }
static_assert(kFan == 8);

inline int num_levels(int64_t tokens) {
  int levels = 1;
  while (levels < kMaxLevels && ceil_div(tokens, node_tokens(levels - 1)) > kFan) ++levels;
  return levels;
}
inline int64_t nodes_at(int64_t tokens, int level) { return ceil_div(tokens, node_tokens(level)); }
// Nodes of a level that meet one another: those of one parent, at the last level all.
inline int64_t group_nodes(int64_t tokens, int level) { return level + 1 < num_levels(tokens) ? kFan : nodes_at(tokens, level); }

template <typename T>
inline constexpr DType kDTypeOf = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;

// Width of a row in whole cache lines: vectors need no remainder.
template <typename T>
int64_t padded(int64_t width) {
  return round_up(width, kAlignment / sizeof(T));
}
// Distance between rows: rows a multiple of 512 bytes apart would share few cache sets.
template <typename T>
int64_t row_stride(int64_t width) {
  constexpr int64_t kLine = kAlignment / sizeof(T);
  const int64_t wide = padded<T>(width);
  return wide % (8 * kLine) == 0 ? wide + kLine : wide;
}

struct Document {
  int64_t batch, first, tokens;  // batch row, first token in it
};
inline int64_t num_documents(const Problem& p) { return p.cu_seqlens ? p.num_documents : p.batch; }
inline Document document(const Problem& p, int64_t n) {
  return p.cu_seqlens ? Document{0, p.cu_seqlens[n], p.cu_seqlens[n + 1] - p.cu_seqlens[n]} : Document{n, 0, p.tokens};
}
inline int64_t longest_document(const Problem& p) {
  int64_t longest = 0;
  for (int64_t n = 0; n < num_documents(p); ++n) longest = std::max(longest, document(p, n).tokens);
  return longest;
}

// One key head of one document.
struct Unit {
  int64_t batch, first, tokens, tiles, head;
};
inline int64_t num_units(const Problem& p) { return num_documents(p) * p.key_heads; }
inline Unit unit_at(const Problem& p, int64_t n) {
  const Document d = document(p, n / p.key_heads);
  return {d.batch, d.first, d.tokens, ceil_div(d.tokens, kTile), n % p.key_heads};
}
// Work in it, in no particular unit.
inline double unit_cost(const Problem& p, int64_t n) {
  const double tokens = static_cast<double>(document(p, n / p.key_heads).tokens);
  return tokens * (tokens + 8 * kTile);
}

// Hands out aligned pieces of a workspace; over a null workspace it counts the bytes.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    T* piece = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment));
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

}  // namespace pathattn::cpu
