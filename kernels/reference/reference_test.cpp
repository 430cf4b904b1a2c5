// The oracle itself: against the definition with explicit K x K products, finite differences, and identities of the mathematics.
#include "kernels/reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/tests/cases.h"
#include "kernels/tests/finite_differences.h"

namespace pathattn::test {
namespace {

using Matrix = std::vector<std::vector<double>>;

Matrix identity(int64_t n) {
  Matrix m(n, std::vector<double>(n));
  for (int64_t i = 0; i < n; ++i) m[i][i] = 1;
  return m;
}

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c(a.size(), std::vector<double>(b[0].size()));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < b[0].size(); ++j) {
      for (size_t l = 0; l < b.size(); ++l) c[i][j] += a[i][l] * b[l][j];
    }
  }
  return c;
}

Matrix householder(const Inputs& in, int64_t b, int64_t t, int64_t h) {
  Matrix m = identity(in.shape.key_width);
  for (size_t r = 0; r < m.size(); ++r) {
    for (size_t c = 0; c < m.size(); ++c) m[r][c] -= in.beta.at(b, t, h) * in.w.at(b, t, h, r) * in.w.at(b, t, h, c);
  }
  return m;
}

// s_ij = scale * q_i (H_i H_{i-1} ... H_{j+1}) k_j^T + sum of the gates, every product written out.
double score(const Inputs& in, int64_t b, int64_t i, int64_t j, int64_t head) {
  const Problem& p = in.shape;
  const int64_t h = head / (p.query_heads / p.key_heads);
  Matrix m = identity(p.key_width);
  double gates = 0;
  for (int64_t t = i; t > j; --t) {
    if (!in.w.empty()) m = product(m, householder(in, b, t, h));
    if (!in.g.empty()) gates += in.g.at(b, t, head);
  }
  double s = 0;
  for (int64_t r = 0; r < p.key_width; ++r) {
    for (int64_t c = 0; c < p.key_width; ++c) s += in.q.at(b, i, head, r) * m[r][c] * in.k.at(b, j, h, c);
  }
  return p.gate_scaled ? p.scale * (s + gates) : p.scale * s + gates;
}

void expect_definition(const Case& c) {
  const Inputs in = make_inputs(c);
  const Outputs got = expected(in, false);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t head = 0; head < c.query_heads; ++head) {
      const int64_t h = head / (c.query_heads / c.key_heads);
      for (int64_t i = 0; i < c.tokens; ++i) {
        double sum = 0;
        std::vector<double> o(c.value_width);
        for (int64_t j = 0; j <= i; ++j) {
          const double weight = std::exp(score(in, b, i, j, head));
          sum += weight;
          for (int64_t x = 0; x < c.value_width; ++x) o[x] += weight * in.v.at(b, j, h, x);
        }
        EXPECT_NEAR(got.lse.at(b, i, head), std::log(sum), 1e-13 * (1 + std::abs(std::log(sum))));
        for (int64_t x = 0; x < c.value_width; ++x) EXPECT_NEAR(got.o.at(b, i, head, x), o[x] / sum, 1e-13);
      }
    }
  }
}

TEST(Reference, is_the_definition_with_explicit_products) {
  const Case c{
      .batch = 2, .tokens = 12, .query_heads = 4, .key_heads = 2, .key_width = 5, .value_width = 3, .dtype = DType::kFloat64, .gate = Gate::kMild};
  expect_definition(c);
  Case scaled = c;
  scaled.gate_scaled = true;
  expect_definition(scaled);
  Case no_gate = c;
  no_gate.gate = Gate::kNone;
  expect_definition(no_gate);
  Case no_w = c;
  no_w.w = W::kNone;
  expect_definition(no_w);
  Case long_w = c;
  long_w.w_length = 1.7;
  expect_definition(long_w);
}

void expect_finite_differences(const Case& c) {
  const Inputs in = make_inputs(c);
  const Outputs out = expected(in);
  expect_derivative(reference_backend(), in, &Inputs::q, out.dq);
  expect_derivative(reference_backend(), in, &Inputs::k, out.dk);
  expect_derivative(reference_backend(), in, &Inputs::v, out.dv);
  expect_derivative(reference_backend(), in, &Inputs::w, out.dw);
  expect_derivative(reference_backend(), in, &Inputs::beta, out.dbeta);
  expect_derivative(reference_backend(), in, &Inputs::g, out.dg);
}

TEST(Reference, gradients_are_finite_differences) {
  const Case c{.batch = 2,
               .tokens = 7,
               .query_heads = 4,
               .key_heads = 2,
               .key_width = 4,
               .value_width = 3,
               .dtype = DType::kFloat64,
               .gate = Gate::kMild,
               .with_d_lse = true};
  expect_finite_differences(c);
  Case scaled = c;
  scaled.gate_scaled = true, scaled.with_d_lse = false, scaled.w_length = 1.3;
  expect_finite_differences(scaled);
  Case documents = c;
  documents.batch = 1, documents.tokens = 11, documents.cu_seqlens = {0, 0, 5, 6, 11};
  expect_finite_differences(documents);
  Case plain = c;
  plain.w = W::kNone, plain.gate = Gate::kNone;
  expect_finite_differences(plain);
}

// Without softmax PaTH is a linear recurrence: sum_j s_ij v_j = scale * S_i q_i^T with S_t = S_{t-1} H_t + v_t^T k_t (V x K).
TEST(Reference, without_softmax_is_a_delta_rule_recurrence) {
  const int64_t tokens = 20, width = 6;
  Inputs in = make_inputs({.tokens = tokens, .key_width = width, .value_width = tokens, .dtype = DType::kFloat64});
  Inputs weights = in;  // values e_j, so that o_i holds row i of the softmax and o_ij exp(lse_i) = exp(s_ij)
  weights.v = in.v.to(DType::kFloat64);
  weights.v.fill([](int64_t, int64_t t, int64_t, int64_t c) { return t == c ? 1 : 0; });
  const Outputs out = forward(reference_backend(), weights);
  Matrix state(tokens, std::vector<double>(width));
  for (int64_t i = 0; i < tokens; ++i) {
    state = product(state, householder(in, 0, i, 0));
    for (int64_t r = 0; r < tokens; ++r) {
      for (int64_t c = 0; c < width; ++c) state[r][c] += in.v.at(0, i, 0, r) * in.k.at(0, i, 0, c);
    }
    for (int64_t r = 0; r < tokens; ++r) {
      double recurrent = 0, summed = 0;
      for (int64_t c = 0; c < width; ++c) recurrent += in.shape.scale * state[r][c] * in.q.at(0, i, 0, c);
      for (int64_t j = 0; j <= i; ++j) summed += (std::log(out.o.at(0, i, 0, j)) + out.lse.at(0, i, 0)) * in.v.at(0, j, 0, r);
      EXPECT_NEAR(summed, recurrent, 1e-12);
    }
  }
}

TEST(Reference, K06_a_gate_of_minus_infinity_is_a_document_boundary) {
  for (const Gate gate : {Gate::kCut, Gate::kNearCut}) {
    Inputs in = make_inputs({.tokens = 256, .query_heads = 2, .key_width = 16, .value_width = 16, .dtype = DType::kFloat64, .gate = gate});
    const Outputs cut = expected(in);
    in.cu_seqlens = {0, 100, 256};
    const Outputs documents = expected(in);
    EXPECT_LE(relative_error(cut.o, documents.o), 1e-15);
    EXPECT_LE(relative_error(cut.dq, documents.dq), 1e-15);
    EXPECT_LE(relative_error(cut.dw, documents.dw), 1e-15);
    EXPECT_LE(relative_error(cut.dg, documents.dg), 1e-15);
    for (int64_t head = 0; head < 2; ++head) EXPECT_EQ(cut.dg.at(0, 100, head), 0);
  }
}

TEST(Reference, takes_float64_only) {
  const Inputs in = make_inputs({.tokens = 3});
  Outputs out = forward(cpu_backend(), in);
  const Status status = reference::forward(forward_arguments(in, out));
  EXPECT_FALSE(status.ok());
  EXPECT_STREQ(status.message, "the reference takes float64");
}

}  // namespace
}  // namespace pathattn::test
