// Inputs whose right result is known in closed form or from a printed example.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "kernels/tests/cases.h"
#include "kernels/tests/decoding.h"

namespace pathattn::test {
namespace {

std::vector<Backend> backends() { return {cpu_backend(2), reference_backend()}; }

std::vector<DType> formats(const Backend& backend) {
  if (backend.name == "reference") return {DType::kFloat64};
  return {DType::kFloat32, DType::kFloat64};
}

// One head of one sequence from rows of numbers.
Tensor from_values(DType dtype, int64_t tokens, int64_t width, const std::vector<double>& values) {
  Tensor x(dtype, {1, tokens, 1, width});
  x.fill([&](int64_t, int64_t t, int64_t, int64_t c) { return values[t * width + c]; });
  return x;
}

void expect_values(const char* name, const Tensor& got, const std::vector<double>& want) {
  const Shape& s = got.shape();
  ASSERT_EQ(static_cast<size_t>(s.size()), want.size()) << name;
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t c = 0; c < s.width; ++c) EXPECT_NEAR(got.at(0, t, 0, c), want[t * s.width + c], 1e-6) << name << " row " << t + 1 << " column " << c;
  }
}

struct WorkedExample {
  std::vector<double> q{1, 0, 1, 1, 2, 1}, k{1, 0, 0, 1, 1, 1}, w{1, 0, .6, .8, .8, .6}, beta{2, 1.5, .5}, g{-9, -.5, -.25};
  std::vector<double> v{1, 0, 0, 0, 1, 0, 0, 0, 1}, d_o = v;

  Inputs inputs(DType dtype, bool gate) const {
    Inputs in;
    in.shape = {.batch = 1, .tokens = 3, .query_heads = 1, .key_heads = 1, .key_width = 2, .value_width = 3, .dtype = dtype, .scale = 1};
    in.q = from_values(dtype, 3, 2, q), in.k = from_values(dtype, 3, 2, k), in.v = from_values(dtype, 3, 3, v);
    in.w = from_values(dtype, 3, 2, w), in.beta = from_values(dtype, 3, 1, beta), in.d_o = from_values(dtype, 3, 3, d_o);
    if (gate) in.g = from_values(dtype, 3, 1, g);
    return in;
  }
};

TEST(Exact, P30_worked_example) {
  for (const Backend& backend : backends()) {
    for (const DType dtype : formats(backend)) {
      const Inputs in = WorkedExample().inputs(dtype, /*gate=*/false);
      Outputs out = forward(backend, in);
      backward(backend, in, out);
      expect_values("o", out.o, {1, 0, 0, 0.2209739, 0.7790261, 0, 0.0574751, 0.0616179, 0.8809070});
      expect_values("dq", out.dq, {0, 0, -0.0791864, 0.2960884, 0.0933509, 0.0958822});
      expect_values("dk", out.dk, {0.0310671, 0.1571979, 0.1113513, 0.1536894, 0.2098197, 0.1049099});
      expect_values("dv", out.dv, {1, 0.2209739, 0.0574751, 0, 0.7790261, 0.0616179, 0, 0, 0.8809070});
      expect_values("dw", out.dw, {0, 0, 0.6391610, 0.1704228, 0.0549463, 0.0342722});
      expect_values("dbeta", out.dbeta, {0, 0.1732783, 0.0645204});
    }
  }
}

TEST(Exact, P30_worked_example_with_gate) {
  for (const Backend& backend : backends()) {
    for (const DType dtype : formats(backend)) {
      const Inputs in = WorkedExample().inputs(dtype, /*gate=*/true);
      Outputs out = forward(backend, in);
      backward(backend, in, out);
      expect_values("o", out.o, {1, 0, 0, 0.1467903, 0.8532097, 0, 0.0283976, 0.0501944, 0.9214081});
      expect_values("dq", out.dq, {0, 0, -0.0576118, 0.2154178, 0.0708090, 0.0528276});
      expect_values("dk", out.dk, {0.0254879, 0.1059094, 0.0734435, 0.1095181, 0.1448305, 0.0724152});
      expect_values("dv", out.dv, {1, 0.1467903, 0.0283976, 0, 0.8532097, 0.0501944, 0, 0, 0.9214081});
      expect_values("dw", out.dw, {0, 0, 0.4391546, 0.1207254, 0.0393150, 0.0431887});
      expect_values("dbeta", out.dbeta, {0, 0.1200243, 0.0573652});
      expect_values("dg", out.dg, {0, -0.1514087, -0.0724152});
    }
  }
}

// What three misreadings of the paper give on the same example, so that the printed numbers are seen to tell them apart.
TEST(Exact, P30_wrong_readings_differ) {
  enum Reading { kRight, kOtherOrder, kNewestFactorOnly, kOldestFactorOnly, kOwnKeyReflected };
  const WorkedExample x;
  const auto reflect = [&](int s, std::array<double, 2> row) {
    const double dot = x.beta[s] * (row[0] * x.w[2 * s] + row[1] * x.w[2 * s + 1]);
    return std::array<double, 2>{row[0] - dot * x.w[2 * s], row[1] - dot * x.w[2 * s + 1]};
  };
  const auto score = [&](int i, int j, Reading reading) {
    std::array<double, 2> key{x.k[2 * j], x.k[2 * j + 1]};
    if (reading == kOwnKeyReflected) key = reflect(j, key);
    for (int step = 0; step < i - j; ++step) {
      const int s = reading == kOtherOrder ? i - step : j + 1 + step;
      if (reading == kNewestFactorOnly && s != i) continue;
      if (reading == kOldestFactorOnly && s != j + 1) continue;
      key = reflect(s, key);
    }
    return x.q[2 * i] * key[0] + x.q[2 * i + 1] * key[1];
  };
  EXPECT_NEAR(score(2, 0, kRight), 0.2704, 1e-12);
  EXPECT_NEAR(score(2, 0, kOtherOrder), 0.472, 1e-12);
  EXPECT_NEAR(score(2, 0, kNewestFactorOnly), 1.12, 1e-12);
  EXPECT_NEAR(score(2, 0, kOldestFactorOnly), 0.2, 1e-12);
  const Outputs out = forward(cpu_backend(), x.inputs(DType::kFloat64, false));
  for (const Reading reading : {kRight, kOtherOrder, kNewestFactorOnly, kOldestFactorOnly, kOwnKeyReflected}) {
    double sum = 0, worst = 0;
    for (int j = 0; j < 3; ++j) sum += std::exp(score(2, j, reading));
    for (int j = 0; j < 3; ++j) worst = std::max(worst, std::abs(out.o.at(0, 2, 0, j) - std::exp(score(2, j, reading)) / sum));
    if (reading == kRight) {
      EXPECT_LE(worst, 1e-6);
    } else {
      EXPECT_GE(worst, 1e-3) << "reading " << reading << " would pass";
    }
  }
}

TEST(Exact, P22_gate_is_added_after_the_scale) {
  for (const Backend& backend : backends()) {
    for (const DType dtype : formats(backend)) {
      Inputs in = make_inputs({.tokens = 3, .key_width = 64, .value_width = 3, .dtype = dtype, .gate = Gate::kMild});
      in.q.fill([](auto...) { return 0; });
      in.v.fill([](int64_t, int64_t t, int64_t, int64_t c) { return t == c ? 1 : 0; });
      in.g.fill([](auto...) { return -0.5; });
      expect_values("last row", forward(backend, in).o.rows(0, 2, 1), {0.1863237, 0.3071959, 0.5064804});
      in.shape.gate_scaled = true;
      expect_values("last row, gate scaled", forward(backend, in).o.rows(0, 2, 1), {0.3127304, 0.3328997, 0.3543699});
    }
  }
}

TEST(Exact, F16_logits_of_131072) {
  for (const bool all_negative : {false, true}) {
    Inputs in = make_inputs({.tokens = 200, .dtype = DType::kBFloat16});
    const auto along = [](int64_t axis, double value) { return [=](int64_t, int64_t, int64_t, int64_t c) { return c == axis ? value : 0.0; }; };
    in.q.fill(along(0, 1024));
    in.k.fill([&](int64_t, int64_t t, int64_t, int64_t c) { return c != 0 ? 0 : all_negative || t % 2 == 0 ? -1024 : 1024; });
    in.w.fill(along(1, 1));
    in.beta.fill([](auto...) { return 2; });
    Outputs out = forward(cpu_backend(2), in);
    backward(cpu_backend(2), in, out);
    Tensor want(DType::kFloat64, out.o.shape());
    std::vector<double> sum(64);
    for (int64_t i = 0; i < 200; ++i) {
      const bool counts = all_negative || i % 2 == 1;
      const int64_t count = all_negative ? i + 1 : (i + 1) / 2;
      for (int64_t c = 0; c < 64; ++c) {
        if (counts) sum[c] += in.v.at(0, i, 0, c);
        want.set(0, i, 0, c, count == 0 ? in.v.at(0, 0, 0, c) : sum[c] / count);
      }
      const double logit = count == 0 || all_negative ? -131072 : 131072;
      EXPECT_NEAR(out.lse.at(0, i, 0), logit + std::log(std::max<int64_t>(count, 1)), 0.0079) << i;  // half a unit in the last place
    }
    EXPECT_LE(relative_error(out.o, want), 0x1p-9);
    for (const Tensor* x : {&out.dq, &out.dk, &out.dv, &out.dw, &out.dbeta}) EXPECT_TRUE(std::isfinite(largest(*x)));
  }
}

// Every w = e_1: s_ij = scale * (q_i k_j - (1 - (1 - beta)^(i-j)) q_i1 k_j1), and with it dq, dk, dv and dbeta.
void expect_closed_form_of_e1(int64_t tokens, double beta, DType dtype) {
  const Inputs in = make_inputs({.tokens = tokens, .dtype = dtype, .w = W::kE1, .beta_from = beta, .beta_to = beta});
  const double scale = in.shape.scale;
  const int64_t width = 64;
  const Inputs exact = in.to(DType::kFloat64);
  const auto row = [](const Tensor& x, int64_t t) { return static_cast<double*>(x.out().data) + t * x.out().token_stride; };
  const auto dot = [](const double* x, const double* y) {
    double sums[4] = {};
    for (int64_t c = 0; c < 64; ++c) sums[c % 4] += x[c] * y[c];
    return sums[0] + sums[1] + sums[2] + sums[3];
  };
  std::vector<double> kept(tokens + 1);  // (1 - beta)^n
  for (int64_t n = 0; n <= tokens; ++n) kept[n] = std::pow(1 - beta, n);
  Outputs want;
  for (Tensor Outputs::*x : {&Outputs::o, &Outputs::dq, &Outputs::dk, &Outputs::dv}) {
    want.*x = Tensor(DType::kFloat64, {1, tokens, 1, width});
    (want.*x).fill([](auto...) { return 0; });
  }
  want.dbeta = Tensor(DType::kFloat64, {1, tokens, 1, 1});
  std::vector<double> d_beta_steps(tokens + 1);  // differences of dbeta from token to token
  std::vector<double> p(tokens), d_p(tokens);
  for (int64_t i = 0; i < tokens; ++i) {
    const double *q = row(exact.q, i), *d_o = row(exact.d_o, i);
    double highest = -1e300, sum = 0, delta = 0;
    for (int64_t j = 0; j <= i; ++j) {
      const double* k = row(exact.k, j);
      p[j] = scale * (dot(q, k) - (1 - kept[i - j]) * q[0] * k[0]);
      highest = std::max(highest, p[j]);
    }
    for (int64_t j = 0; j <= i; ++j) sum += p[j] = std::exp(p[j] - highest);
    for (int64_t j = 0; j <= i; ++j) {
      p[j] /= sum;
      delta += p[j] * (d_p[j] = dot(d_o, row(exact.v, j)));
    }
    for (int64_t j = 0; j <= i; ++j) {
      const double ds = scale * p[j] * (d_p[j] - delta);
      const double *k = row(exact.k, j), *v = row(exact.v, j);
      double *o = row(want.o, i), *dq = row(want.dq, i), *dk = row(want.dk, j), *dv = row(want.dv, j);
      for (int64_t c = 0; c < width; ++c) {
        o[c] += p[j] * v[c];
        dv[c] += p[j] * d_o[c];
        dq[c] += ds * k[c];
        dk[c] += ds * q[c];
      }
      dq[0] -= ds * (1 - kept[i - j]) * k[0];
      dk[0] -= ds * (1 - kept[i - j]) * q[0];
      if (i == j) continue;
      const double d_beta = -ds * q[0] * k[0] * kept[i - j - 1];  // the same for beta_{j+1} ... beta_i
      d_beta_steps[j + 1] += d_beta;
      d_beta_steps[i + 1] -= d_beta;
    }
  }
  double d_beta = 0;
  for (int64_t t = 0; t < tokens; ++t) want.dbeta.set(0, t, 0, 0, d_beta += d_beta_steps[t]);
  Outputs got = forward(cpu_backend(2), in);
  backward(cpu_backend(2), in, got);
  const Tolerance bound = tolerance({.dtype = dtype, .beta_from = beta});
  EXPECT_LE(relative_error(got.o, want.o), bound.o) << "o, T " << tokens << " beta " << beta;
  EXPECT_LE(relative_error(got.dq, want.dq), bound.dqkv) << "dq, T " << tokens << " beta " << beta;
  EXPECT_LE(relative_error(got.dk, want.dk), bound.dqkv) << "dk, T " << tokens << " beta " << beta;
  EXPECT_LE(relative_error(got.dv, want.dv), bound.dqkv) << "dv, T " << tokens << " beta " << beta;
  EXPECT_LE(relative_error(got.dbeta, want.dbeta), bound.dbeta_dg) << "dbeta, T " << tokens << " beta " << beta;
}

TEST(Exact, K01_every_w_the_same_axis) {
  for (const double beta : {2.0, 1.0, 0.5}) {
    for (const int64_t tokens : {64, 65, 128, 1000}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) expect_closed_form_of_e1(tokens, beta, dtype);
    }
    expect_closed_form_of_e1(4096, beta, DType::kFloat32);
  }
}

TEST(Exact, P26_beta_1_leaves_keys_orthogonal_to_the_last_w) {
  for (const int64_t tokens : {2, 64, 65, 513, 600}) {
    const Inputs in = make_inputs({.tokens = tokens, .beta_from = 1, .beta_to = 1});
    const State state(in, 1024);
    prefill(in, state, 2);
    const Tensor keys = carried_keys(state, tokens, 2);
    for (int64_t j = 0; j < tokens - 1; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < 64; ++c) dot += keys.at(0, j, 0, c) * in.w.at(0, tokens - 1, 0, c);
      EXPECT_LE(std::abs(dot), 1e-5) << "key " << j << " of " << tokens;
    }
  }
}

TEST(Exact, P26_beta_2_keeps_the_length_of_every_key) {
  const Inputs in = make_inputs({.tokens = 1024, .beta_from = 2, .beta_to = 2});
  const State state(in, 1024);
  prefill(in.tokens(0, 24), state, 2);
  decode(in.tokens(24, 1000), state, 2);
  const Tensor keys = carried_keys(state, 1024, 2);
  for (int64_t j = 0; j < 1024; ++j) {
    EXPECT_NEAR(norm(keys.rows(0, j, 1)), norm(in.k.rows(0, j, 1)), 1e-5 * norm(in.k.rows(0, j, 1))) << "key " << j;
  }
}

TEST(Exact, P10_one_token_gives_its_value_and_no_gradient_but_dv) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    const Inputs in = make_inputs(
        {.batch = 10, .tokens = 1, .query_heads = 8, .key_heads = 2, .key_width = 128, .value_width = 128, .dtype = dtype, .gate = Gate::kMild});
    Outputs out = forward(cpu_backend(3), in);
    backward(cpu_backend(3), in, out);
    for (int64_t b = 0; b < 10; ++b) {
      for (int64_t head = 0; head < 8; ++head) {
        for (int64_t c = 0; c < 128; ++c) ASSERT_EQ(out.o.at(b, 0, head, c), in.v.at(b, 0, head / 4, c));
      }
    }
    for (const Tensor* x : {&out.dq, &out.dk, &out.dw, &out.dbeta, &out.dg}) EXPECT_LE(largest(*x), 1e-4);
  }
}

TEST(Exact, P32_gradients_of_w_beta_and_gate_keep_single_precision) {
  const Inputs in = make_inputs({.tokens = 130, .query_heads = 2, .dtype = DType::kBFloat16, .gate = Gate::kMild});
  Outputs out = forward(cpu_backend(2), in);
  backward(cpu_backend(2), in, out);
  for (const Tensor* x : {&out.dw, &out.dbeta, &out.dg}) {
    int64_t with_low_bits = 0;
    for (int64_t t = 1; t < 130; ++t) with_low_bits += (std::bit_cast<uint32_t>(static_cast<float>(x->at(0, t, 0))) & 0xffff) != 0;
    EXPECT_GE(with_low_bits, 120);
  }
}

}  // namespace
}  // namespace pathattn::test
