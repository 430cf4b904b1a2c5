// Backward: everything forward prepared is prepared again, then keys meet queries level by level from the coarsest down, and each level's
// gradients are pulled back to the next. docs/cpu-kernels.md explains; backward_workspace.h has the phases.
#include "kernels/cpu/backward_workspace.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/backward.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/gradients-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu {
namespace HWY_NAMESPACE {

template <typename T>
class BackwardWork {
 public:
  BackwardWork(const BackwardArguments& arguments, void* workspace, int num_workers)
      : a_(arguments), p_(arguments.problem), has_w_(arguments.w.data), gated_(arguments.g.data), memory_(workspace, p_, has_w_, num_workers) {}

  double cost(int64_t unit) const { return unit_cost(p_, unit); }
  void open(int64_t unit, int64_t slot) { memory_.units[slot] = unit_at(p_, unit); }
  int num_phases(int64_t slot) const {
    return static_cast<int>(phase_at(std::numeric_limits<int64_t>::max(), memory_.units[slot].tokens, has_w_, gated_).step);
  }
  int64_t num_tasks(int64_t slot, int phase) const {
    const Unit& unit = memory_.units[slot];
    const Phase now = phase_at(phase, unit.tokens, has_w_, gated_);
    const int64_t nodes = nodes_at(unit.tokens, now.level);
    switch (now.kind) {
      case Phase::kPrepare:
        return unit.tiles + (gated_ ? group_ : 0);
      case Phase::kCarry:
        return nodes;
      case Phase::kPairs:
        return has_w_ ? (nodes - now.distance) * blocks_per_node(now.level) : ceil_div(unit.tokens, kPlainBlock) - now.distance;
      case Phase::kBetween:
      case Phase::kBetweenBack:
        return nodes - now.distance;
      case Phase::kPullBack:
        return nodes;
      case Phase::kGroups:
        return ceil_div(nodes, kFan);
      case Phase::kTiles:
        return unit.tiles;
      case Phase::kGates:
        return group_;
    }
    return 0;
  }
  void run(int64_t slot, int phase, int64_t task, int worker) {
    Arena of_slot(memory_.slots + slot * memory_.bytes_of_slot), of_worker(memory_.scratches + worker * memory_.bytes_of_scratch);
    const Context c{memory_.units[slot], BackwardUnit<T>(of_slot, p_, has_w_, memory_.longest), BackwardScratch<T>(of_worker, p_)};
    const Phase now = phase_at(phase, c.unit.tokens, has_w_, gated_);
    switch (now.kind) {
      case Phase::kPrepare:
        return task < c.unit.tiles ? prepare(c, task) : prepare_gates(c, task - c.unit.tiles);
      case Phase::kCarry:
        return carry(c, now.level, task);
      case Phase::kBetween:
        return multiply_between(c, now, task);
      case Phase::kPairs:
        return has_w_ ? pair_blocks(c, now, task) : pair_plain_blocks(c, task, task + now.distance);
      case Phase::kBetweenBack:
        return differentiate_between(c, now, task);
      case Phase::kPullBack:
        return pull_back(c, now.level, task);
      case Phase::kGroups:
        return finish_group(c, task);
      case Phase::kTiles:
        return finish_tile(c, task);
      case Phase::kGates:
        return finish_gates(c, task);
    }
  }

 private:
  struct Context {
    const Unit& unit;
    const BackwardUnit<T> in;
    const BackwardScratch<T> s;
  };

  int64_t padded_tokens(const Context& c) const { return c.unit.tiles * kTile; }
  int64_t rows_in(const Context& c, int64_t tile) const { return std::min(kTile, c.unit.tokens - tile * kTile); }
  Gates gates(const Context& c, int64_t member) const {
    if (!gated_) return {};
    const int64_t offset = member * padded_tokens(c);
    return {c.in.gate_sums + offset, c.in.gate_rests + offset, c.in.gate_cuts + offset};
  }
  // Where a member's rows or packed columns of a tile begin.
  int64_t k_at(const Context& c, int64_t member, int64_t tile) const { return (member * padded_tokens(c) + tile * kTile) * k_stride_; }
  int64_t v_at(const Context& c, int64_t member, int64_t tile) const { return (member * padded_tokens(c) + tile * kTile) * v_stride_; }
  int64_t columns_at(const Context& c, int64_t member, int64_t tile, int64_t width) const {
    return (member * padded_tokens(c) + tile * kTile) * width;
  }
  int64_t token_at(const Context& c, int64_t member, int64_t tile) const { return member * padded_tokens(c) + tile * kTile; }
  T* matrix(T* matrices, int64_t n) const { return matrices + n * p_.key_width * k_stride_; }

  // C (+)= A B for K x K matrices.
  void product(Into into, Left<T> a, const T* b, T* c) const {
    multiply<T>(into, p_.key_width, padded<T>(p_.key_width), p_.key_width, a, rows(b, k_stride_), rows(c, k_stride_));
  }
  // Packs the transpose of a matrix: what columns(packed, key_width) multiplies with is matrix^T.
  void pack_transposed(const T* from, T* packed) const {
    std::memset(packed, 0, p_.key_width * round_up(p_.key_width, kPanel<T>) * sizeof(T));
    pack_columns(from, k_stride_, p_.key_width, p_.key_width, packed);
  }
  void product_with_transposed(Into into, const T* a, const T* b, T* packed, T* c) const {
    pack_transposed(b, packed);
    multiply<T>(into, p_.key_width, padded<T>(p_.key_width), p_.key_width, left(a, k_stride_), columns<const T>(packed, p_.key_width),
                rows(c, k_stride_));
  }
  void rows_times(Into into, int64_t m, const T* a, Panels<const T> b, T* c) const {
    multiply<T>(into, m, padded<T>(p_.key_width), p_.key_width, left(a, k_stride_), b, rows(c, k_stride_));
  }
  // c += a^T b for m rows each.
  void add_outer(Into into, int64_t m, const T* a, const T* b, T* c) const {
    multiply<T>(into, p_.key_width, padded<T>(p_.key_width), m, transposed(a, k_stride_), rows(b, k_stride_), rows(c, k_stride_));
  }

  void prepare(const Context& c, int64_t tile) const {
    const BackwardUnit<T>& to = c.in;
    const BackwardScratch<T>& s = c.s;
    const Unit& unit = c.unit;
    const int64_t first = tile * kTile, m = rows_in(c, tile), padded_rows = round_up(m, kBlock), width = p_.key_width;
    load_tile<T>(p_.dtype, a_.v, unit, unit.head, first, m, p_.value_width, 1, to.v + first * v_stride_, padded_rows);
    std::memset(to.dv + first * v_stride_, 0, kTile * v_stride_ * sizeof(T));
    std::memset(to.dk + first * k_stride_, 0, kTile * k_stride_ * sizeof(T));
    if (has_w_) {
      load_tile<T>(p_.dtype, a_.k, unit, unit.head, first, m, width, 1, s.k, padded_rows);
      pack_columns(s.k, k_stride_, padded_rows, width, s.k_columns);
      load_w(unit, first, m, padded_rows, s);
      prepare_tile(Tile<T>{padded_rows, width, k_stride_, s.w, s.beta, s.w_columns, s.k_columns, to.n + first * kTile, to.x + first * kTile,
                           to.u + first * k_stride_, matrix(to.products[0], tile)});
      std::memset(to.keys[0] + first * k_stride_, 0, padded_rows * k_stride_ * sizeof(T));
      unpack_columns(s.k_columns, padded_rows, width, to.keys[0] + first * k_stride_, k_stride_);
      for (int level = 0; level < num_levels(unit.tokens); ++level) {
        if (first % node_tokens(level) == 0) std::memset(matrix(to.d_products[level], first / node_tokens(level)), 0, width * k_stride_ * sizeof(T));
      }
    } else {
      load_tile<T>(p_.dtype, a_.k, unit, unit.head, first, m, width, 1, to.k + first * k_stride_, padded_rows);
    }
    for (int64_t member = 0; member < group_; ++member) prepare_queries(c, member, tile);
  }

  void load_w(const Unit& unit, int64_t first, int64_t m, int64_t padded_rows, const BackwardScratch<T>& s) const {
    load_tile<T>(kDTypeOf<T>, a_.w, unit, unit.head, first, m, p_.key_width, 1, s.w, padded_rows);
    load_rows<T>(element<T>(a_.beta, unit, unit.head, first), kDTypeOf<T>, a_.beta.token_stride, m, 1, 1, s.beta, 1, padded_rows, 1);
  }

  void prepare_queries(const Context& c, int64_t member, int64_t tile) const {
    const BackwardUnit<T>& to = c.in;
    const BackwardScratch<T>& s = c.s;
    const int64_t first = tile * kTile, m = rows_in(c, tile), padded_rows = round_up(m, kBlock), width = p_.key_width,
                  head = c.unit.head * group_ + member;
    T *q = to.q + k_at(c, member, tile), *d_o = to.d_o + v_at(c, member, tile);
    T *lse = to.lse + token_at(c, member, tile), *delta = to.delta + token_at(c, member, tile);
    load_tile<T>(p_.dtype, a_.q, c.unit, head, first, m, width, static_cast<T>(p_.scale), q, padded_rows);
    load_tile<T>(p_.dtype, a_.d_o, c.unit, head, first, m, p_.value_width, 1, d_o, padded_rows);
    load_tile<T>(p_.dtype, a_.o, c.unit, head, first, m, p_.value_width, 1, s.o, padded_rows);
    pack_columns(d_o, v_stride_, padded_rows, p_.value_width, to.d_o_columns + columns_at(c, member, tile, p_.value_width));
    std::memset(to.dq + k_at(c, member, tile), 0, kTile * k_stride_ * sizeof(T));
    for (int64_t i = 0; i < padded_rows; ++i) {
      T sum = 0;
      for (int64_t j = 0; j < p_.value_width; ++j) sum += d_o[i * v_stride_ + j] * s.o[i * v_stride_ + j];
      if (i < m && a_.d_lse.data) sum -= *element<T>(a_.d_lse, c.unit, head, first + i);
      lse[i] = i < m ? *element<T>(a_.lse, c.unit, head, first + i) : kInfinity<T>;
      delta[i] = sum;
    }
    std::memset(to.d_row_sums + token_at(c, member, tile), 0, kTile * sizeof(double));
    std::memset(to.d_key_sums + token_at(c, member, tile), 0, kTile * sizeof(double));
    if (!has_w_) {
      pack_columns(q, k_stride_, padded_rows, width, to.q_columns + columns_at(c, member, tile, width));
      return;
    }
    multiply_lower<T>(Into::kSet, padded_rows, width, left<T>(q, k_stride_), columns<const T>(s.w_columns, width), s.r, kTile);
    keep_lower(padded_rows, false, s.r);
    lower_times<T>(Into::kSubtract, padded_rows, padded<T>(width), s.r, rows<const T>(to.u + first * k_stride_, k_stride_), rows(q, k_stride_));
  }

  void prepare_gates(const Context& c, int64_t member) const {
    sum_gates(element<T>(a_.g, c.unit, c.unit.head * group_ + member, 0), a_.g.token_stride, c.unit.tokens, p_.gate_scaled ? p_.scale : 1,
              gates(c, member));
  }

  // Products of a node's children after each child, newest first: suffixes[j] = G_last ... G_{j+1}; suffixes[first - 1] would be the whole product,
  // which is returned. suffixes[last] is the identity and left out.
  const T* suffixes_of(const Context& c, int level, int64_t node) const {
    const int64_t begin = node * kFan;
    for (int64_t j = kFan - 2; j >= -1; --j) {
      const T* g = matrix(c.in.products[level - 1], begin + j + 1);
      T* to = matrix(c.s.suffix, j + 1);
      if (j == kFan - 2) {
        std::memcpy(to, g, p_.key_width * k_stride_ * sizeof(T));
      } else {
        product(Into::kSet, left<T>(matrix(c.s.suffix, j + 2), k_stride_), g, to);
      }
    }
    return c.s.suffix;
  }
  const T* suffix(const Context& c, int64_t j) const { return matrix(c.s.suffix, j + 1); }

  // Products before each child: prefix(j) = G_{j-1} ... G_0 for j >= 1 of `count` children.
  void prefixes_of(const Context& c, int level, int64_t node, int64_t count) const {
    for (int64_t j = 1; j < count; ++j) {
      const T* g = matrix(c.in.products[level - 1], node * kFan + j - 1);
      if (j == 1) {
        std::memcpy(matrix(c.s.suffix, j), g, p_.key_width * k_stride_ * sizeof(T));
      } else {
        product(Into::kSet, left<T>(g, k_stride_), matrix(c.s.suffix, j - 1), matrix(c.s.suffix, j));
      }
    }
  }
  const T* prefix(const Context& c, int64_t j) const { return matrix(c.s.suffix, j); }

  // Keys to the end and queries to the start of a node, and its product.
  void carry(const Context& c, int level, int64_t node) const {
    const BackwardUnit<T>& u = c.in;
    const int64_t tiles_of_child = node_tokens(level - 1) / kTile, first_child = node * kFan;
    const int64_t children = std::min(kFan, nodes_at(c.unit.tokens, level - 1) - first_child);
    if (node + 1 < nodes_at(c.unit.tokens, level)) {
      std::memcpy(matrix(u.products[level], node), suffixes_of(c, level, node), p_.key_width * k_stride_ * sizeof(T));
      for (int64_t j = 0; j < kFan; ++j) {
        const int64_t at = k_at(c, 0, (first_child + j) * tiles_of_child), m = tiles_of_child * kTile;
        if (j == kFan - 1) {
          std::memcpy(u.keys[level] + at, u.keys[level - 1] + at, m * k_stride_ * sizeof(T));
        } else {
          pack_transposed(suffix(c, j), c.s.packed);
          rows_times(Into::kSet, m, u.keys[level - 1] + at, columns<const T>(c.s.packed, p_.key_width), u.keys[level] + at);
        }
      }
    }
    prefixes_of(c, level, node, children);
    for (int64_t member = 0; member < group_; ++member) {
      for (int64_t j = 0; j < children; ++j) {
        for (int64_t tile = (first_child + j) * tiles_of_child; tile < std::min(c.unit.tiles, (first_child + j + 1) * tiles_of_child); ++tile) {
          const int64_t at = k_at(c, member, tile), padded_rows = round_up(rows_in(c, tile), kBlock);
          const T* from = (level == 1 ? u.q : u.queries[level - 1]) + at;
          T* to = u.queries[level] + at;
          if (j == 0) {
            std::memcpy(to, from, padded_rows * k_stride_ * sizeof(T));
          } else {
            rows_times(Into::kSet, padded_rows, from, rows<const T>(prefix(c, j), k_stride_), to);
          }
          pack_columns(to, k_stride_, padded_rows, p_.key_width, u.query_columns[level] + columns_at(c, member, tile, p_.key_width));
        }
      }
    }
  }

  bool in_one_group(const Context& c, int level, int64_t a, int64_t b) const {
    const int64_t group = group_nodes(c.unit.tokens, level);
    return b < nodes_at(c.unit.tokens, level) && a / group == b / group;
  }

  // M_{A,B} = G_{B-1} M_{A,B-1} for nodes A and B = A + distance, from M_{A,A+2} = G_{A+1}. Made anew for each distance: all of them at once would
  // take memory that grows with the square of the nodes.
  void multiply_between(const Context& c, const Phase& now, int64_t a) const {
    const int64_t b = a + now.distance, bytes = p_.key_width * k_stride_ * static_cast<int64_t>(sizeof(T));
    if (!in_one_group(c, now.level, a, b)) return;
    const auto g = [&](int64_t node) { return matrix(c.in.products[now.level], node); };
    T *between = matrix(c.in.between, a), *shorter = matrix(c.in.shorter, a);
    std::memcpy(between, g(a + 1), bytes);
    for (int64_t node = a + 2; node < b; ++node) {
      std::memcpy(shorter, between, bytes);
      product(Into::kSet, left<T>(g(node), k_stride_), shorter, between);
    }
  }

  QueryTile<T> query_tile(const Context& c, int64_t member, int64_t tile, const T* q, const T* q_columns, T* dq) const {
    const BackwardUnit<T>& u = c.in;
    const int64_t m = rows_in(c, tile), token = token_at(c, member, tile);
    return {m,
            round_up(m, kBlock),
            q,
            q_columns,
            u.d_o + v_at(c, member, tile),
            u.d_o_columns + columns_at(c, member, tile, p_.value_width),
            u.lse + token,
            u.delta + token,
            dq,
            gated_ || corrects_ ? u.d_row_sums + token : nullptr};
  }

  void add(const Context& c, int64_t member, int64_t query, const QueryTile<T>& queries, int64_t key, const T* k, T* dk) const {
    const BackwardUnit<T>& u = c.in;
    const BackwardScratch<T>& s = c.s;
    const KeyTile<T> keys{k, u.v + key * kTile * v_stride_, dk, u.dv + key * kTile * v_stride_,
                          gated_ ? u.d_key_sums + token_at(c, member, key) : nullptr};
    HWY_ALIGN T key_gate[kTile];
    if (gated_) {
      gates_of_rows(gates(c, member), query * kTile, queries.m, s.row_gate);
      gates_of_keys(gates(c, member), query * kTile, key * kTile, kTile, key_gate);
    }
    add_pair(queries, keys, p_.key_width, p_.value_width, gated_ ? s.row_gate : nullptr, gated_ ? key_gate : nullptr, s.scores, s.d_scores);
  }

  // Block i of node A against block (i + step) of node A + distance. Blocks of one step share neither keys nor queries, and a query's sums are
  // added to in the order of the steps.
  void pair_blocks(const Context& c, const Phase& now, int64_t task) const {
    const BackwardUnit<T>& u = c.in;
    const int level = now.level;
    const int64_t blocks = blocks_per_node(level), tiles = block_tokens(level) / kTile;
    const int64_t a = task / blocks, i = task % blocks, b = a + now.distance;
    if (!in_one_group(c, level, a, b)) return;
    const int64_t first_key = (a * blocks + i) * tiles, first_query = (b * blocks + (i + now.step) % blocks) * tiles;
    const bool moves = now.distance > 1;
    const T* between = moves ? matrix(u.between, a) : nullptr;
    T *keys = moves ? u.moved : u.keys[level], *d_keys = moves ? u.d_moved : u.dk;
    const int64_t at = k_at(c, 0, first_key), m = tiles * kTile;
    if (moves && now.step == 0) {
      pack_transposed(between, c.s.packed);
      rows_times(Into::kSet, m, u.keys[level] + at, columns<const T>(c.s.packed, p_.key_width), keys + at);
      std::memset(d_keys + at, 0, m * k_stride_ * sizeof(T));
    }
    for (int64_t key = first_key; key < first_key + tiles; ++key) {
      for (int64_t member = 0; member < group_; ++member) {
        for (int64_t query = first_query; query < std::min(c.unit.tiles, first_query + tiles); ++query) {
          const int64_t q_at = k_at(c, member, query);
          add(c, member, query,
              query_tile(c, member, query, u.queries[level] + q_at, u.query_columns[level] + columns_at(c, member, query, p_.key_width), u.dq + q_at),
              key, keys + k_at(c, 0, key), d_keys + k_at(c, 0, key));
        }
      }
    }
    if (moves && now.step == blocks - 1) rows_times(Into::kAdd, m, d_keys + at, rows<const T>(between, k_stride_), u.dk + at);
  }

  // moved = K-> M_{A,B}^T and M_{A,B+1} = G_B M_{A,B}:  dM_{A,B} = d_moved^T K-> + G_B^T dM_{A,B+1}. The last term is there from the larger distance
  // before.
  void differentiate_between(const Context& c, const Phase& now, int64_t a) const {
    const BackwardUnit<T>& u = c.in;
    const int64_t b = a + now.distance, at = k_at(c, 0, a * node_tokens(now.level) / kTile), size = p_.key_width * k_stride_;
    if (!in_one_group(c, now.level, a, b)) return;
    T *d_between = matrix(u.d_between, a), *d_g = matrix(u.d_products[now.level], b - 1);
    const bool is_farthest = !in_one_group(c, now.level, a, b + 1);
    add_outer(is_farthest ? Into::kSet : Into::kAdd, node_tokens(now.level), u.d_moved + at, u.keys[now.level] + at, d_between);
    if (now.distance == 2) {
      for (int64_t i = 0; i < size; ++i) d_g[i] += d_between[i];
      return;
    }
    product_with_transposed(Into::kAdd, d_between, matrix(u.shorter, a), c.s.packed, d_g);
    product(Into::kSet, transposed<T>(matrix(u.products[now.level], b - 1), k_stride_), d_between, c.s.matrix);
    std::memcpy(d_between, c.s.matrix, size * sizeof(T));
  }

  // Keys' gradients from a whole node's end to its children's ends, with what the products that carried them are owed:
  //   keys of child j: K->_node = K->_child S_j^T, S_{j-1} = S_j G_j
  void pull_back_keys(const Context& c, int level, int64_t node) const {
    const BackwardUnit<T>& u = c.in;
    const int64_t m = node_tokens(level - 1), first_child = node * kFan;
    suffixes_of(c, level, node);
    T* d_suffix = c.s.d_matrix;
    std::memcpy(d_suffix, matrix(u.d_products[level], node), p_.key_width * k_stride_ * sizeof(T));
    for (int64_t j = 0; j < kFan; ++j) {
      T* d_g = matrix(u.d_products[level - 1], first_child + j);
      if (j == kFan - 1) {
        for (int64_t i = 0; i < p_.key_width * k_stride_; ++i) d_g[i] += d_suffix[i];
        break;
      }
      product(Into::kAdd, transposed<T>(suffix(c, j), k_stride_), d_suffix, d_g);
      product_with_transposed(Into::kSet, d_suffix, matrix(u.products[level - 1], first_child + j), c.s.packed, c.s.matrix);
      std::memcpy(d_suffix, c.s.matrix, p_.key_width * k_stride_ * sizeof(T));
      for (int64_t row = 0; row < m; row += kTile) {
        T* dk = u.dk + k_at(c, 0, (first_child + j) * (m / kTile)) + row * k_stride_;
        const T* k = u.keys[level - 1] + k_at(c, 0, (first_child + j) * (m / kTile)) + row * k_stride_;
        add_outer(Into::kAdd, kTile, dk, k, d_suffix);
        rows_times(Into::kSet, kTile, dk, rows<const T>(suffix(c, j), k_stride_), c.s.dk);
        std::memcpy(dk, c.s.dk, kTile * k_stride_ * sizeof(T));
      }
    }
  }

  // The same for queries of child j: Q<-_node = Q<-_child F_j, F_{j+1} = G_j F_j.
  void pull_back_queries(const Context& c, int level, int64_t node) const {
    const BackwardUnit<T>& u = c.in;
    const int64_t tiles_of_child = node_tokens(level - 1) / kTile, first_child = node * kFan;
    const int64_t children = std::min(kFan, nodes_at(c.unit.tokens, level - 1) - first_child);
    prefixes_of(c, level, node, children);
    T *d_prefix = c.s.d_matrix, *d_next = c.s.matrix;
    std::memset(d_next, 0, p_.key_width * k_stride_ * sizeof(T));
    for (int64_t j = children - 1; j >= 1; --j) {
      std::memset(d_prefix, 0, p_.key_width * k_stride_ * sizeof(T));
      if (j + 1 < children) {
        const T* g = matrix(u.products[level - 1], first_child + j);
        product_with_transposed(Into::kAdd, d_next, prefix(c, j), c.s.packed, matrix(u.d_products[level - 1], first_child + j));
        product(Into::kSet, transposed(g, k_stride_), d_next, d_prefix);
      }
      pack_transposed(prefix(c, j), c.s.packed);
      for (int64_t member = 0; member < group_; ++member) {
        for (int64_t tile = (first_child + j) * tiles_of_child; tile < std::min(c.unit.tiles, (first_child + j + 1) * tiles_of_child); ++tile) {
          const int64_t at = k_at(c, member, tile), padded_rows = round_up(rows_in(c, tile), kBlock);
          add_outer(Into::kAdd, padded_rows, u.queries[level - 1] + at, u.dq + at, d_prefix);
          rows_times(Into::kSet, padded_rows, u.dq + at, columns<const T>(c.s.packed, p_.key_width), c.s.dq);
          std::memcpy(u.dq + at, c.s.dq, padded_rows * k_stride_ * sizeof(T));
        }
      }
      std::swap(d_prefix, d_next);
    }
    if (children > 1) {  // F_1 = G_0
      T* d_g = matrix(u.d_products[level - 1], first_child);
      for (int64_t i = 0; i < p_.key_width * k_stride_; ++i) d_g[i] += d_next[i];
    }
  }

  void pull_back(const Context& c, int level, int64_t node) const {
    if (node + 1 < nodes_at(c.unit.tokens, level)) pull_back_keys(c, level, node);
    pull_back_queries(c, level, node);
  }

  // The finest level: a query tile's chain through the earlier tiles of its group is walked down and back up.
  void finish_group(const Context& c, int64_t group) const {
    const BackwardUnit<T>& u = c.in;
    const BackwardScratch<T>& s = c.s;
    const bool carried = num_levels(c.unit.tokens) > 1;
    const int64_t first = group * kFan, count = std::min(kFan, c.unit.tiles - first);
    if (carried && group + 1 < nodes_at(c.unit.tokens, 1)) pull_back_keys(c, 1, group);
    const int64_t packed_size = p_.key_width * round_up(p_.key_width, kMaxPanel);
    for (int64_t t = 0; t + 1 < count; ++t) pack_transposed(matrix(u.products[0], first + t), s.packed_products + t * packed_size);
    for (int64_t member = 0; member < group_; ++member) {
      for (int64_t t = 1; t < count; ++t) {
        const int64_t padded_rows = round_up(rows_in(c, first + t), kBlock);
        const auto link = [&](int64_t tile) { return tile == t - 1 ? u.q + k_at(c, member, first + t) : s.chain + tile * kTile * k_stride_; };
        for (int64_t to = t - 2; to >= 0; --to) {
          rows_times(Into::kSet, padded_rows, link(to + 1), rows<const T>(matrix(u.products[0], first + to + 1), k_stride_), link(to));
        }
        T *dq = u.dq + k_at(c, member, first + t), *dq_next = s.dq;
        for (int64_t tile = 0; tile < t; ++tile) {
          if (tile > 0 || carried) {
            add_outer(Into::kAdd, padded_rows, link(tile), dq, matrix(u.d_products[0], first + tile));
            rows_times(Into::kSet, padded_rows, dq, columns<const T>(s.packed_products + tile * packed_size, p_.key_width), dq_next);
            std::memcpy(dq, dq_next, padded_rows * k_stride_ * sizeof(T));
          }
          pack_columns(link(tile), k_stride_, padded_rows, p_.key_width, s.chain_columns);
          const int64_t key = k_at(c, 0, first + tile);
          add(c, member, first + t, query_tile(c, member, first + t, link(tile), s.chain_columns, dq), first + tile, u.keys[0] + key, u.dk + key);
        }
      }
    }
    for (int64_t t = 0; t < count; ++t) finish_tile(c, first + t);
  }

  void finish_tile(const Context& c, int64_t tile) const {
    const BackwardUnit<T>& u = c.in;
    const BackwardScratch<T>& s = c.s;
    const Unit& unit = c.unit;
    const int64_t first = tile * kTile, m = rows_in(c, tile), padded_rows = round_up(m, kBlock), width = p_.key_width;
    const int64_t k_rows = padded_rows * k_stride_ * static_cast<int64_t>(sizeof(T));
    T* dk_end = u.dk + first * k_stride_;
    load_tile<T>(p_.dtype, a_.k, unit, unit.head, first, m, width, 1, s.k, padded_rows);
    pack_columns(s.k, k_stride_, padded_rows, width, s.k_columns);
    pack_columns(u.v + first * v_stride_, v_stride_, padded_rows, p_.value_width, s.v_columns);
    OwnTile<T> own{.m = m,
                   .padded_rows = padded_rows,
                   .first = first,
                   .k_width = width,
                   .v_width = p_.value_width,
                   .k = s.k,
                   .k_columns = s.k_columns,
                   .v_columns = s.v_columns,
                   .dv = u.dv + first * v_stride_,
                   .dk = s.dk,
                   .dw = s.dw,
                   .du = s.du,
                   .dx = s.dx,
                   .scores = s.scores,
                   .d_scores = s.d_scores,
                   .r = s.r,
                   .d_r = s.d_r};
    if (has_w_) {
      load_w(unit, first, m, padded_rows, s);
      own.w = s.w;
      own.beta = s.beta;
      own.u = u.u + first * k_stride_;
      own.x = u.x + first * kTile;
      own.n = u.n + first * kTile;
      pack_columns(s.w, k_stride_, padded_rows, width, s.w_columns);
      pack_columns(own.u, k_stride_, padded_rows, width, s.u_columns);
      pack_columns(own.x, kTile, padded_rows, padded_rows, s.x_columns);
      own.w_columns = s.w_columns;
      own.u_columns = s.u_columns;
      own.x_columns = s.x_columns;
      std::memset(s.dw, 0, k_rows);
      std::memset(s.du, 0, k_rows);
      std::memset(s.dx, 0, kTile * kTile * sizeof(T));
      std::memset(s.dk, 0, k_rows);
    } else {
      std::memcpy(s.dk, dk_end, k_rows);
    }
    for (int64_t member = 0; member < group_; ++member) {
      const int64_t token = token_at(c, member, tile), head = unit.head * group_ + member;
      T* dq = u.dq + k_at(c, member, tile);
      load_tile<T>(p_.dtype, a_.q, unit, head, first, m, width, static_cast<T>(p_.scale), s.q, padded_rows);
      for (int64_t i = 0; i < m; ++i) s.d_lse[i] = a_.d_lse.data ? *element<T>(a_.d_lse, unit, head, first + i) : T(0);
      add_own_tile(own, s.q, u.d_o + v_at(c, member, tile), u.lse + token, u.delta + token, gates(c, member), s.row_gate, dq, s.dq,
                   u.d_row_sums + token, u.d_key_sums + token, corrects_ ? s.d_lse : nullptr);
      store_tile(
          p_.dtype, dq, m, width, [&](int64_t) { return static_cast<T>(p_.scale); }, a_.dq, unit, head, first);
    }
    const auto one = [](int64_t) { return T(1); };
    if (has_w_) {
      pack_columns(dk_end, k_stride_, padded_rows, width, s.dk_columns);
      const T* d_g = matrix(u.d_products[0], tile);
      pack_transposed(d_g, s.packed);
      add_products_of_tile(own, dk_end, s.dk_columns, d_g, s.packed, s.scores, s.d_scores, s.r, s.d_beta);
      store_tile(kDTypeOf<T>, s.dw, m, width, one, a_.dw, unit, unit.head, first);
      for (int64_t i = 0; i < m; ++i) *element<T>(a_.dbeta, unit, unit.head, first + i) = s.d_beta[i];
    }
    store_tile(p_.dtype, s.dk, m, width, one, a_.dk, unit, unit.head, first);
    store_tile(p_.dtype, u.dv + first * v_stride_, m, p_.value_width, one, a_.dv, unit, unit.head, first);
  }

  // Without w: all pairs of tiles, key before query, of two blocks.
  void pair_plain_blocks(const Context& c, int64_t key_block, int64_t query_block) const {
    const BackwardUnit<T>& u = c.in;
    constexpr int64_t kTiles = kPlainBlock / kTile;
    for (int64_t key = key_block * kTiles; key < std::min(c.unit.tiles, (key_block + 1) * kTiles); ++key) {
      for (int64_t member = 0; member < group_; ++member) {
        for (int64_t query = std::max(key + 1, query_block * kTiles); query < std::min(c.unit.tiles, (query_block + 1) * kTiles); ++query) {
          const int64_t q_at = k_at(c, member, query), k_at_key = k_at(c, 0, key);
          add(c, member, query, query_tile(c, member, query, u.q + q_at, u.q_columns + columns_at(c, member, query, p_.key_width), u.dq + q_at), key,
              u.k + k_at_key, u.dk + k_at_key);
        }
      }
    }
  }

  // A pair's gate sums g from the token after the key to the query: dg_t = sum over queries from t on minus sum over keys from t on. Nothing
  // passes a gate that closes for good.
  void finish_gates(const Context& c, int64_t member) const {
    const double* by_row = c.in.d_row_sums + token_at(c, member, 0);
    const double* by_key = c.in.d_key_sums + token_at(c, member, 0);
    const int32_t* cuts = gates(c, member).cuts;
    const double factor = p_.gate_scaled ? p_.scale : 1;
    T* dg = element<T>(View{a_.dg}, c.unit, c.unit.head * group_ + member, 0);
    double sum = 0;
    for (int64_t i = c.unit.tokens - 1; i >= 0; --i) {
      sum = cuts[i] == i ? 0 : sum + by_row[i] - by_key[i];
      dg[i * a_.dg.token_stride] = static_cast<T>(factor * sum);
    }
  }

  const BackwardArguments& a_;
  const Problem& p_;
  const bool has_w_, gated_;
  const bool corrects_ = p_.dtype == DType::kBFloat16;  // delta, for what o's rounding did to it
  const int64_t group_ = p_.query_heads / p_.key_heads, k_stride_ = row_stride<T>(p_.key_width), v_stride_ = row_stride<T>(p_.value_width);
  const BackwardWorkspace<T> memory_;
};

template <typename T>
void backward_as(const BackwardArguments& arguments, void* workspace, const Executor& executor) {
  BackwardWork<T> work(arguments, workspace, executor.num_workers);
  run_units(executor, num_units(arguments.problem), work);
}
void backward_float32(const BackwardArguments& arguments, void* workspace, const Executor& executor) {
  backward_as<float>(arguments, workspace, executor);
}
void backward_float64(const BackwardArguments& arguments, void* workspace, const Executor& executor) {
  backward_as<double>(arguments, workspace, executor);
}

}  // namespace HWY_NAMESPACE
}  // namespace pathattn::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pathattn::cpu {

HWY_EXPORT(backward_float32);
HWY_EXPORT(backward_float64);

size_t backward_workspace_size(const Problem& p, bool has_w, int num_workers) {
  if (!check(p).ok()) return 0;
  return p.dtype == DType::kFloat64 ? BackwardWorkspace<double>(nullptr, p, has_w, num_workers).used
                                    : BackwardWorkspace<float>(nullptr, p, has_w, num_workers).used;
}

Status backward(const BackwardArguments& arguments, void* workspace, const Executor& executor) {
  if (const Status status = check(arguments); !status.ok()) return status;
  if (arguments.problem.batch * arguments.problem.tokens == 0) return {};
  if (arguments.problem.dtype == DType::kFloat64) {
    HWY_DYNAMIC_DISPATCH(backward_float64)(arguments, workspace, executor);
  } else {
    HWY_DYNAMIC_DISPATCH(backward_float32)(arguments, workspace, executor);
  }
  return {};
}

}  // namespace pathattn::cpu
#endif
