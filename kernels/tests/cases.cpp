#include "kernels/tests/cases.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/tests/random.h"

namespace pathattn::test {
namespace {

constexpr DType kBF16 = DType::kBFloat16, kF64 = DType::kFloat64;

const char* suffix(DType dtype) { return dtype == kBF16 ? "_bf16" : dtype == kF64 ? "_f64" : "_f32"; }

class Table {
 public:
  void add(Case c) {
    c.name += suffix(c.dtype);
    c.seed = ++seed_;
    cases_.push_back(std::move(c));
  }
  void add(Case c, std::initializer_list<DType> dtypes) {
    for (const DType dtype : dtypes) {
      c.dtype = dtype;
      add(c);
    }
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
  uint64_t seed_ = 0;
};

constexpr std::initializer_list<DType> kAll = {DType::kFloat32, kBF16, kF64}, kSingleAndHalf = {DType::kFloat32, kBF16};

void add_lengths(Table& table) {
  for (int64_t t = 1; t <= 200; ++t) {
    // Every length in float32; other formats share the cutting into blocks and see every fifth.
    const Case c{.name = "K12_t" + std::to_string(t), .batch = 2, .tokens = t, .query_heads = 4, .key_heads = 2, .gate = Gate::kMild};
    table.add(c);
    if (t % 5 == 1) table.add(c, {kBF16, kF64});
  }
  for (const int64_t t : {1, 2, 15, 16, 17, 31, 32, 33, 61, 62, 63, 64, 65}) {
    table.add({.name = "P10_t" + std::to_string(t),
               .batch = 10,
               .tokens = t,
               .query_heads = 8,
               .key_heads = 2,
               .key_width = 128,
               .value_width = 128,
               .dtype = kBF16,
               .gate = Gate::kMild});
  }
  for (const int64_t t : {255, 256, 257})
    table.add({.name = "length_" + std::to_string(t), .tokens = t, .query_heads = 2, .gate = Gate::kMild}, kAll);
  for (const int64_t t : {511, 512, 513, 640, 1000})
    table.add({.name = "length_" + std::to_string(t), .tokens = t, .gate = Gate::kMild}, kSingleAndHalf);
  table.add({.name = "length_1000_k128", .tokens = 1000, .key_width = 128, .value_width = 128, .beta_from = 1.5}, kSingleAndHalf);
  table.add({.name = "length_4097", .tokens = 4097, .key_width = 32, .value_width = 32, .gate = Gate::kMild});
  table.add({.name = "length_4700", .tokens = 4700, .key_width = 16, .value_width = 16, .gate = Gate::kMild});
}

void add_widths(Table& table) {
  for (const auto& [k, v] : {std::pair<int64_t, int64_t>{64, 128}, {128, 64}}) {
    table.add({.name = "P01_k" + std::to_string(k) + "_v" + std::to_string(v),
               .batch = 2,
               .tokens = 1024,
               .query_heads = 4,
               .key_heads = 2,
               .key_width = k,
               .value_width = v,
               .dtype = kBF16});
  }
  for (const int64_t k : {16, 32, 64, 96, 128}) {
    for (const int64_t v : {16, 32, 64, 96, 128}) {
      table.add({.name = "F04_k" + std::to_string(k) + "_v" + std::to_string(v),
                 .batch = 2,
                 .tokens = 130,
                 .query_heads = 4,
                 .key_heads = 2,
                 .key_width = k,
                 .value_width = v},
                kSingleAndHalf);
    }
  }
  for (const int64_t width : {1, 2, 3, 5, 7, 8, 20, 40, 72, 80, 96, 112, 160, 192, 224, 255, 256}) {
    table.add({.name = "F12_width_" + std::to_string(width),
               .tokens = 100,
               .query_heads = 2,
               .key_width = width,
               .value_width = width,
               .gate = Gate::kMild},
              kSingleAndHalf);
  }
  for (const auto& [k, v] : {std::pair<int64_t, int64_t>{1, 64}, {64, 1}, {7, 33}, {33, 7}, {256, 1}, {1, 256}, {65, 63}}) {
    table.add({.name = "width_k" + std::to_string(k) + "_v" + std::to_string(v),
               .tokens = 150,
               .query_heads = 2,
               .key_heads = 2,
               .key_width = k,
               .value_width = v,
               .gate = Gate::kMild},
              kAll);
  }
}

void add_heads_and_documents(Table& table) {
  for (const auto& [hq, h] : {std::pair<int64_t, int64_t>{8, 1}, {8, 2}, {6, 3}, {5, 5}}) {
    table.add({.name = "P25_hq" + std::to_string(hq) + "_h" + std::to_string(h),
               .batch = 2,
               .tokens = 150,
               .query_heads = hq,
               .key_heads = h,
               .gate = Gate::kMild},
              kSingleAndHalf);
  }
  table.add(
      {.name = "K10_empty_documents", .tokens = 70, .query_heads = 4, .key_heads = 2, .gate = Gate::kMild, .cu_seqlens = {0, 0, 5, 5, 5, 70, 70}},
      kAll);
  table.add({.name = "documents_0_1_63_64_65",
             .tokens = 386,
             .query_heads = 2,
             .gate = Gate::kMild,
             .cu_seqlens = {0, 0, 1, 64, 128, 193, 194, 194, 321, 386}},
            kAll);
  table.add({.name = "documents_of_one_token",
             .tokens = 9,
             .query_heads = 4,
             .key_heads = 2,
             .gate = Gate::kMild,
             .cu_seqlens = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
            kAll);
  table.add({.name = "documents_500_513", .tokens = 1013, .gate = Gate::kMild, .cu_seqlens = {0, 500, 1013}}, kSingleAndHalf);
  for (const int64_t width : {64, 128}) {
    table.add({.name = "P05_k" + std::to_string(width),
               .tokens = 2048,
               .key_width = width,
               .value_width = width,
               .gate = Gate::kMild,
               .cu_seqlens = {0, 15, 333, 2048}});
  }
  table.add(
      {.name = "P06_batches", .batch = 3, .tokens = 1000, .query_heads = 4, .key_heads = 2, .key_width = 16, .value_width = 16, .gate = Gate::kMild});
  table.add({.name = "P06_documents", .tokens = 200, .query_heads = 4, .key_heads = 2, .gate = Gate::kMild, .cu_seqlens = {0, 63, 64, 200}},
            kSingleAndHalf);
}

void add_gates(Table& table) {
  for (const bool with_w : {true, false}) {
    const std::string w_name = with_w ? "" : "_no_w";
    const W w = with_w ? W::kUnit : W::kNone;
    table.add({.name = "K05_alternating" + w_name, .tokens = 300, .query_heads = 2, .w = w, .gate = Gate::kAlternating}, kAll);
    table.add({.name = "K06_cut" + w_name, .tokens = 256, .query_heads = 2, .w = w, .gate = Gate::kCut}, kAll);
    table.add({.name = "K06_near_cut" + w_name, .tokens = 256, .query_heads = 2, .w = w, .gate = Gate::kNearCut}, kAll);
    table.add({.name = "gate_strong" + w_name, .tokens = 300, .query_heads = 2, .w = w, .gate = Gate::kStrong}, kAll);
    table.add({.name = "gate_scaled" + w_name, .tokens = 300, .query_heads = 2, .w = w, .gate = Gate::kMild, .gate_scaled = true}, kAll);
    table.add({.name = "gate_scaled_cut" + w_name, .tokens = 256, .query_heads = 2, .w = w, .gate = Gate::kCut, .gate_scaled = true}, kAll);
    table.add({.name = "no_gate" + w_name, .tokens = 300, .query_heads = 2, .w = w}, kAll);
  }
  table.add({.name = "K06_near_cut_long", .tokens = 700, .gate = Gate::kNearCut}, kSingleAndHalf);
  table.add({.name = "no_w_gqa",
             .batch = 2,
             .tokens = 700,
             .query_heads = 4,
             .key_heads = 2,
             .key_width = 32,
             .value_width = 48,
             .w = W::kNone,
             .gate = Gate::kMild},
            kSingleAndHalf);
}

void add_beta_and_w(Table& table) {
  for (const double beta : {0.0, 1e-4, 0.5, 1.0, 1.5, 1.999, 2.0}) {
    std::string digits = std::to_string(beta);
    std::replace(digits.begin(), digits.end(), '.', '_');
    table.add({.name = "P26_beta_" + digits, .tokens = 300, .beta_from = beta, .beta_to = beta}, kAll);
  }
  for (const double beta : {2.0, 1.0, 0.5}) {
    for (const int64_t t : {64, 65, 128, 1000}) {
      table.add({.name = "K01_beta_" + std::to_string(static_cast<int>(10 * beta)) + "_tenths_t" + std::to_string(t),
                 .tokens = t,
                 .w = W::kE1,
                 .beta_from = beta,
                 .beta_to = beta},
                kSingleAndHalf);
    }
  }
  table.add({.name = "rank2_beta_near_2", .tokens = 1000, .w = W::kRank2, .beta_from = 1.99, .beta_to = 2}, kSingleAndHalf);
  table.add({.name = "P27_a", .tokens = 64, .w = W::kSame, .w_length = 1 + 0x1p-8, .beta_from = 2}, kAll);
  table.add({.name = "P27_b", .tokens = 64, .w_length = 1.05, .beta_from = 2}, kAll);
  table.add({.name = "P28_all_zero", .tokens = 150, .query_heads = 2, .w = W::kZero}, kAll);
  table.add({.name = "P28_some_zero", .tokens = 150, .query_heads = 2, .w = W::kSomeZero}, kAll);
  table.add({.name = "short_w", .tokens = 300, .w_length = 1e-3}, kSingleAndHalf);
}

void add_strides(Table& table) {
  for (const auto& [name, layout] : {std::pair<std::string, Layout>{"heads_first", Layout::kHeadsFirst}, {"fused", Layout::kFused}}) {
    table.add({.name = "F07_" + name,
               .batch = 2,
               .tokens = 130,
               .query_heads = 4,
               .key_heads = 2,
               .key_width = 40,
               .value_width = 24,
               .gate = Gate::kMild,
               .layout = layout,
               .with_d_lse = true},
              kAll);
    table.add({.name = "F07_" + name + "_documents",
               .tokens = 600,
               .query_heads = 2,
               .key_width = 33,
               .value_width = 17,
               .gate = Gate::kMild,
               .cu_seqlens = {0, 3, 3, 540, 600},
               .layout = layout},
              kSingleAndHalf);
  }
  table.add({.name = "with_d_lse", .tokens = 200, .query_heads = 4, .key_heads = 2, .gate = Gate::kMild, .with_d_lse = true}, kAll);
  table.add({.name = "with_d_lse_no_w", .tokens = 200, .query_heads = 4, .key_heads = 2, .w = W::kNone, .with_d_lse = true}, kAll);
}

double log_sigmoid(double x) { return -std::log1p(std::exp(-x)); }

double gate(Gate kind, int64_t token, Random& random) {
  switch (kind) {
    case Gate::kMild:
      return log_sigmoid(random.normal() + 4);
    case Gate::kAlternating:
      return token % 2 ? -5 : 0;
    case Gate::kStrong:
      return random.uniform(-60, 0);
    case Gate::kCut:
      return token == 100 ? -std::numeric_limits<double>::infinity() : random.uniform(-0.7, 0);
    case Gate::kNearCut:
      return token == 100 ? -1e4 : random.uniform(-0.7, 0);
    case Gate::kNone:
    case Gate::kZero:
      break;
  }
  return 0;
}

void fill_w(Tensor& w, const Case& c, Random& random) {
  const Shape& s = w.shape();
  std::vector<double> row(s.width), first(s.width), second(s.width);
  const auto draw = [&](std::vector<double>& x) {
    double sum = 0;
    for (double& value : x) value = random.normal(), sum += value * value;
    for (double& value : x) value /= std::sqrt(sum);
  };
  draw(first);
  draw(second);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t h = 0; h < s.heads; ++h) {
        draw(row);
        if (c.w == W::kE1) row.assign(s.width, 0.0), row[0] = 1;
        if (c.w == W::kSame) row = first;
        if (c.w == W::kZero || (c.w == W::kSomeZero && t % 3 == 1)) row.assign(s.width, 0.0);
        if (c.w == W::kRank2) {
          const double x = random.normal(), y = random.normal();
          double sum = 0;
          for (int64_t i = 0; i < s.width; ++i) row[i] = x * first[i] + y * second[i], sum += row[i] * row[i];
          for (double& value : row) value /= std::sqrt(sum);
        }
        for (int64_t i = 0; i < s.width; ++i) w.set(b, t, h, i, c.w_length * row[i]);
      }
    }
  }
}

}  // namespace

const std::vector<Case>& cases() {
  static const std::vector<Case> all = [] {
    Table table;
    add_lengths(table);
    add_widths(table);
    add_heads_and_documents(table);
    add_gates(table);
    add_beta_and_w(table);
    add_strides(table);
    return table.take();
  }();
  return all;
}

Inputs make_inputs(const Case& c) {
  Random random(c.seed);
  const auto normal = [&](int64_t, int64_t, int64_t, int64_t) { return random.normal(); };
  const DType compute = compute_type(c.dtype);
  Inputs in;
  in.shape = {.batch = c.batch,
              .tokens = c.tokens,
              .query_heads = c.query_heads,
              .key_heads = c.key_heads,
              .key_width = c.key_width,
              .value_width = c.value_width,
              .dtype = c.dtype,
              .scale = 1 / std::sqrt(static_cast<double>(c.key_width)),
              .gate_scaled = c.gate_scaled};
  in.cu_seqlens = c.cu_seqlens;
  in.q = Tensor(c.dtype, {c.batch, c.tokens, c.query_heads, c.key_width}, c.layout);
  in.k = Tensor(c.dtype, {c.batch, c.tokens, c.key_heads, c.key_width}, c.layout);
  in.v = Tensor(c.dtype, {c.batch, c.tokens, c.key_heads, c.value_width}, c.layout);
  in.d_o = Tensor(c.dtype, {c.batch, c.tokens, c.query_heads, c.value_width}, c.layout);
  for (Tensor* x : {&in.q, &in.k, &in.v, &in.d_o}) x->fill(normal);
  if (c.w != W::kNone) {
    in.w = Tensor(compute, {c.batch, c.tokens, c.key_heads, c.key_width}, c.layout);
    fill_w(in.w, c, random);
    in.beta = Tensor(compute, {c.batch, c.tokens, c.key_heads, 1}, c.layout);
    in.beta.fill([&](int64_t, int64_t, int64_t, int64_t) { return random.uniform(c.beta_from, c.beta_to); });
  }
  if (c.gate != Gate::kNone) {
    in.g = Tensor(compute, {c.batch, c.tokens, c.query_heads, 1}, c.layout);
    in.g.fill([&](int64_t, int64_t t, int64_t, int64_t) { return gate(c.gate, t, random); });
  }
  if (c.with_d_lse) {
    in.d_lse = Tensor(compute, {c.batch, c.tokens, c.query_heads, 1}, c.layout);
    in.d_lse.fill(normal);
  }
  return in;
}

Tolerance tolerance(const Case& c) {
  const double u = unit_roundoff(c.dtype), u_lse = unit_roundoff(compute_type(c.dtype));
  if (c.dtype == DType::kBFloat16 || c.dtype == DType::kFloat16) {
    // Inside everything is float32, so that what remains is the rounding of o (which the gradients meet again in their row sums) and of the result.
    const double hard = c.beta_from > 1.9 ? 2 : 1;
    return {.o = 1.5 * u * hard, .lse = 60 * u_lse, .dqkv = 2 * u * hard, .dw = 4 * u * hard, .dbeta_dg = 6 * u * hard};
  }
  return {.o = 100 * u, .lse = 60 * u, .dqkv = 300 * u, .dw = 600 * u, .dbeta_dg = 600 * u};
}

}  // namespace pathattn::test
