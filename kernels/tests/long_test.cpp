// A document of so many tokens that nodes of the last level have more earlier siblings than a lower level's ever have. A reference for all pairs
// would take gigabytes there, so a few rows alone are checked: only they have an output gradient, and each is followed from its token back to the
// first.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cpu/layout.h"
#include "kernels/tests/expectations.h"

namespace pathattn::test {
namespace {

using Row = std::vector<double>;

Row row_of(const Tensor& x, int64_t token) {
  Row row(x.shape().width);
  for (size_t c = 0; c < row.size(); ++c) row[c] = x.at(0, token, 0, static_cast<int64_t>(c));
  return row;
}
double dot(const Row& x, const Row& y) {
  double sum = 0;
  for (size_t c = 0; c < x.size(); ++c) sum += x[c] * y[c];
  return sum;
}
void add_multiple(double factor, const Row& x, Row& y) {
  for (size_t c = 0; c < x.size(); ++c) y[c] += factor * x[c];
}
void add_to_row(Tensor& x, int64_t token, double factor, const Row& row) {
  for (size_t c = 0; c < row.size(); ++c) {
    const int64_t column = static_cast<int64_t>(c);
    x.set(0, token, 0, column, x.at(0, token, 0, column) + factor * row[c]);
  }
}

// Row i of a problem with one head: o and lse, and what its output gradient adds to all gradients.
//   x_j = q_i H_i ... H_{j+1}       s_j = scale x_j k_j + g_{j+1} + ... + g_i       D_j = sum_{t <= j} ds_t k_t H_{t+1} ... H_j is scale^-1 times
//   dx_j
void add_row(const Inputs& in, int64_t i, Outputs& out) {
  const double scale = in.shape.scale;
  std::vector<Row> x(i + 1);
  Row weights(i + 1);
  double gates = 0, highest = -INFINITY, sum = 0;
  x[i] = row_of(in.q, i);
  for (int64_t j = i; j >= 0; --j) {
    weights[j] = scale * dot(x[j], row_of(in.k, j)) + gates;
    highest = std::max(highest, weights[j]);
    gates += in.g.at(0, j, 0);
    if (j == 0) break;
    const Row w = row_of(in.w, j);
    x[j - 1] = x[j];
    add_multiple(-in.beta.at(0, j, 0) * dot(x[j], w), w, x[j - 1]);
  }
  for (double& weight : weights) sum += weight = std::exp(weight - highest);
  for (double& weight : weights) weight /= sum;
  out.lse.set(0, i, 0, 0, highest + std::log(sum));
  Row o(in.shape.value_width);
  for (int64_t j = 0; j <= i; ++j) add_multiple(weights[j], row_of(in.v, j), o);
  add_to_row(out.o, i, 1, o);

  const Row d_o = row_of(in.d_o, i);
  const double delta = dot(d_o, o);
  Row d(in.shape.key_width);
  double d_gate = 0;
  for (int64_t j = 0; j <= i; ++j) {
    if (j > 0) {
      const Row w = row_of(in.w, j);
      const double beta = in.beta.at(0, j, 0), x_w = dot(x[j], w), d_w = dot(d, w);
      add_to_row(out.dbeta, j, 1, {-scale * x_w * d_w});
      add_to_row(out.dw, j, -scale * beta * x_w, d);
      add_to_row(out.dw, j, -scale * beta * d_w, x[j]);
      add_multiple(-beta * d_w, w, d);
      add_to_row(out.dg, j, 1, {d_gate});
    }
    const double d_score = weights[j] * (dot(d_o, row_of(in.v, j)) - delta);
    d_gate += d_score;
    add_multiple(d_score, row_of(in.k, j), d);
    add_to_row(out.dk, j, scale * d_score, x[j]);
    add_to_row(out.dv, j, weights[j], d_o);
  }
  add_to_row(out.dq, i, scale, d);
}

Outputs expected_of_rows(const Inputs& in, const std::vector<int64_t>& rows) {
  const auto zeros = [](const Tensor& x) { return Tensor(DType::kFloat64, x.shape()); };
  Outputs out{zeros(in.d_o), zeros(in.beta), zeros(in.q), zeros(in.k), zeros(in.v), zeros(in.w), zeros(in.beta), zeros(in.g)};
  for (Tensor* x : {&out.o, &out.lse, &out.dq, &out.dk, &out.dv, &out.dw, &out.dbeta, &out.dg}) x->fill([](auto...) { return 0; });
  for (const int64_t i : rows) add_row(in, i, out);
  return out;
}

Inputs with_gradients_of_rows(const Case& c, const std::vector<int64_t>& rows) {
  Inputs in = make_inputs(c);
  in.d_o.fill([&, d_o = in.d_o.to(c.dtype)](int64_t b, int64_t t, int64_t h, int64_t i) {
    return std::find(rows.begin(), rows.end(), t) == rows.end() ? 0 : d_o.at(b, t, h, i);
  });
  return in;
}

TEST(LongDocument, rows_alone_are_what_the_reference_gives) {
  const std::vector<int64_t> rows = {0, 70, 199};
  const Inputs in = with_gradients_of_rows({.tokens = 200, .key_width = 5, .value_width = 3, .dtype = DType::kFloat64, .gate = Gate::kMild}, rows);
  const Outputs got = expected_of_rows(in, rows), want = expected(in);
  const Tolerance bound = tolerance({.dtype = DType::kFloat64});
  for (const int64_t i : rows) {
    EXPECT_LE(relative_error(got.o.rows(0, i, 1), want.o.rows(0, i, 1)), bound.o);
    EXPECT_NEAR(got.lse.at(0, i, 0), want.lse.at(0, i, 0), 10 * bound.lse);
  }
  expect_gradients(got, want, bound);
}

TEST(LongDocument, top_nodes_meet_siblings_of_any_number) {
  const int64_t node = cpu::node_tokens(cpu::kMaxLevels - 1), tokens = (cpu::kFan + 1) * node + 100;
  const std::vector<int64_t> rows = {node - 1, node, 5 * node + 1000, cpu::kFan * node, cpu::kFan * node + 600, tokens - 1};
  // Reflections, which shorten nothing: the first keys reach the last rows. Float64 held to float32's bounds, since what is at stake is that no node
  // is left out; rounding over so many reflections is another matter.
  const Case c{.tokens = tokens, .key_width = 8, .value_width = 8, .dtype = DType::kFloat64, .beta_from = 2, .gate = Gate::kZero};
  const Inputs in = with_gradients_of_rows(c, rows);
  Outputs got = forward(cpu_backend(), in);
  backward(cpu_backend(), in, got);
  const Outputs want = expected_of_rows(in, rows);
  const Tolerance bound = tolerance({.dtype = DType::kFloat32});
  for (const int64_t i : rows) {
    EXPECT_LE(relative_error(got.o.rows(0, i, 1), want.o.rows(0, i, 1)), bound.o) << i;
    EXPECT_NEAR(got.lse.at(0, i, 0), want.lse.at(0, i, 0), bound.lse * (1 + largest(want.lse))) << i;
  }
  expect_gradients(got, want, bound);
  Outputs again = forward(cpu_backend(3), in);
  backward(cpu_backend(3), in, again);
  EXPECT_TRUE(same_bits(again, got)) << "other bits with other workers";
}

}  // namespace
}  // namespace pathattn::test
