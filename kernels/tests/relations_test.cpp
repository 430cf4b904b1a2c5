// Runs that must agree with one another: with copies, parts, repetitions, other strides, other scales of the same input.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/cpu/cpu.h"
#include "kernels/tests/cases.h"

namespace pathattn::test {
namespace {

Outputs run(const Inputs& in, Layout layout = Layout::kContiguous) {
  Outputs out = forward(cpu_backend(2), in, layout);
  backward(cpu_backend(2), in, out, layout);
  return out;
}

constexpr Tensor Outputs::*kAllOutputs[] = {&Outputs::o,  &Outputs::lse, &Outputs::dq,    &Outputs::dk,
                                            &Outputs::dv, &Outputs::dw,  &Outputs::dbeta, &Outputs::dg};

void expect_same_bits(const Outputs& x, const Outputs& y) {
  for (size_t i = 0; i < std::size(kAllOutputs); ++i) EXPECT_TRUE(same_bits(x.*kAllOutputs[i], y.*kAllOutputs[i])) << "output " << i;
}

TEST(Relations, P25_heads_of_a_group_add_up) {
  for (const auto& [query_heads, key_heads] : {std::pair<int64_t, int64_t>{8, 1}, {8, 2}, {6, 3}, {5, 5}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Case c{.batch = 2, .tokens = 150, .query_heads = query_heads, .key_heads = key_heads, .dtype = dtype, .gate = Gate::kMild};
      const Inputs in = make_inputs(c);
      const int64_t group = query_heads / key_heads;
      Inputs repeated = in;
      repeated.shape.key_heads = query_heads;
      const auto repeat = [&](const Tensor& x) {
        Shape shape = x.shape();
        shape.heads = query_heads;
        Tensor wide(x.dtype(), shape);
        wide.fill([&](int64_t b, int64_t t, int64_t h, int64_t i) { return x.at(b, t, h / group, i); });
        return wide;
      };
      repeated.k = repeat(in.k), repeated.v = repeat(in.v), repeated.w = repeat(in.w), repeated.beta = repeat(in.beta);
      const Outputs grouped = run(in), apart = run(repeated);
      EXPECT_TRUE(same_bits(grouped.o, apart.o));
      EXPECT_TRUE(same_bits(grouped.dq, apart.dq));
      EXPECT_TRUE(same_bits(grouped.dg, apart.dg));
      const Tolerance bound = tolerance(c);
      const auto expect_sum = [&](const char* name, const Tensor& sum, const Tensor& parts, double most) {
        Tensor want(DType::kFloat64, sum.shape());
        want.fill([&](int64_t b, int64_t t, int64_t h, int64_t i) {
          double total = 0;
          for (int64_t a = h * group; a < (h + 1) * group; ++a) total += parts.at(b, t, a, i);
          return total;
        });
        EXPECT_LE(relative_error(sum, want), most) << name;
      };
      expect_sum("dk", grouped.dk, apart.dk, bound.dqkv);
      expect_sum("dv", grouped.dv, apart.dv, bound.dqkv);
      expect_sum("dw", grouped.dw, apart.dw, bound.dw);
      expect_sum("dbeta", grouped.dbeta, apart.dbeta, bound.dbeta_dg);
    }
  }
}

void expect_documents_as_alone(const Inputs& in) {
  const Outputs together = run(in);
  for (int64_t n = 0; n < in.num_documents(); ++n) {
    const int64_t b = in.cu_seqlens.empty() ? n : 0, first = in.cu_seqlens.empty() ? 0 : in.cu_seqlens[n];
    const Inputs one = in.document(n);
    if (one.shape.tokens == 0) continue;
    const Outputs alone = run(one);
    for (size_t i = 0; i < std::size(kAllOutputs); ++i) {
      const Tensor part = (together.*kAllOutputs[i]).rows(b, first, one.shape.tokens);
      EXPECT_TRUE(same_bits(part, alone.*kAllOutputs[i])) << "output " << i << " of document " << n;
    }
  }
}

TEST(Relations, P05_a_packed_document_equals_its_run_alone) {
  for (const int64_t width : {64, 128}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Case c{.tokens = 2048, .key_width = width, .value_width = width, .dtype = dtype, .gate = Gate::kMild, .cu_seqlens = {0, 15, 333, 2048}};
      expect_documents_as_alone(make_inputs(c));
    }
  }
}

TEST(Relations, P06_batches_and_documents_equal_their_runs_alone) {
  expect_documents_as_alone(
      make_inputs({.batch = 3, .tokens = 1000, .query_heads = 4, .key_heads = 2, .key_width = 16, .value_width = 16, .gate = Gate::kMild}));
  expect_documents_as_alone(make_inputs({.tokens = 200, .query_heads = 4, .key_heads = 2, .gate = Gate::kMild, .cu_seqlens = {0, 63, 64, 200}}));
}

TEST(Relations, K10_empty_documents_change_nothing) {
  Inputs in = make_inputs({.tokens = 70, .query_heads = 4, .key_heads = 2, .gate = Gate::kMild, .cu_seqlens = {0, 0, 5, 5, 5, 70, 70}});
  expect_documents_as_alone(in);
  const Outputs with_empty = run(in);
  in.cu_seqlens = {0, 5, 70};
  expect_same_bits(with_empty, run(in));
  for (const int64_t first : {0, 5}) {
    for (const Tensor* x : {&with_empty.dw, &with_empty.dbeta, &with_empty.dg}) EXPECT_LE(largest(x->rows(0, first, 1)), 1e-6 * largest(*x));
  }
}

TEST(Relations, K17_a_row_does_not_depend_on_its_batch_or_neighbours) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Inputs row = make_inputs({.tokens = 300, .query_heads = 4, .key_heads = 2, .dtype = dtype, .gate = Gate::kMild});
    const Outputs alone = run(row);
    const auto expand = [&](int64_t batch, int64_t before) {
      const Inputs other = make_inputs({.tokens = 300 + before, .query_heads = 4, .key_heads = 2, .dtype = dtype, .gate = Gate::kMild, .seed = 7});
      Inputs in = row;
      in.shape.batch = batch, in.shape.tokens = 300 + before;
      if (before > 0) in.cu_seqlens = {0, before, before + 300};
      for (Tensor Inputs::*member : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::w, &Inputs::beta, &Inputs::g, &Inputs::d_o}) {
        const Tensor &own = row.*member, &neighbour = other.*member;
        Tensor wide(own.dtype(), {batch, 300 + before, own.shape().heads, own.shape().width});
        wide.fill([&](int64_t, int64_t t, int64_t h, int64_t i) { return t < before ? neighbour.at(0, t, h, i) : own.at(0, t - before, h, i); });
        in.*member = wide;
      }
      return in;
    };
    for (const auto& [batch, before] : {std::pair<int64_t, int64_t>{4, 0}, {8, 0}, {1, 9}, {1, 10}}) {
      const Outputs out = run(expand(batch, before));
      for (int64_t b = 0; b < batch; ++b) {
        for (const auto member : kAllOutputs) {
          EXPECT_TRUE(same_bits((out.*member).rows(b, before, 300), alone.*member)) << "batch " << batch << ", " << before << " tokens before";
        }
      }
    }
  }
}

TEST(Relations, K05_a_gate_of_zero_is_no_gate) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Inputs in = make_inputs({.tokens = 300, .query_heads = 2, .dtype = dtype, .gate = Gate::kZero});
    Outputs gated = run(in);
    in.g = {};
    gated.dg = {};
    expect_same_bits(gated, run(in));
  }
}

TEST(Relations, K06_a_gate_of_minus_infinity_is_a_document_boundary) {
  for (const Gate gate : {Gate::kCut, Gate::kNearCut}) {
    for (const bool gate_scaled : {false, true}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
        const Case c{.tokens = 256, .dtype = dtype, .gate = gate, .gate_scaled = gate_scaled};
        Inputs in = make_inputs(c);
        const Outputs cut = run(in);
        EXPECT_LE(std::abs(cut.dg.at(0, 100, 0)), 1e-6);
        in.cu_seqlens = {0, 100, 256};
        const Outputs documents = run(in);
        const Tolerance bound = tolerance(c);
        EXPECT_LE(relative_error(cut.o, documents.o), bound.o);
        for (const auto member : {&Outputs::dq, &Outputs::dk, &Outputs::dv}) EXPECT_LE(relative_error(cut.*member, documents.*member), bound.dqkv);
        EXPECT_LE(relative_error(cut.dw, documents.dw), bound.dw);
        EXPECT_LE(relative_error(cut.dbeta, documents.dbeta), bound.dbeta_dg);
        EXPECT_LE(relative_error(cut.dg, documents.dg), bound.dbeta_dg);
      }
    }
  }
}

TEST(Relations, both_gate_conventions_convert_into_each_other) {
  const Case c{.tokens = 300, .query_heads = 2, .dtype = DType::kFloat64, .gate = Gate::kMild};
  Inputs in = make_inputs(c);
  const Outputs added = run(in);
  in.shape.gate_scaled = true;
  in.g = in.g.to(DType::kFloat64);
  in.g.fill([&, g = in.g.to(DType::kFloat64)](int64_t b, int64_t t, int64_t h, int64_t) { return g.at(b, t, h) / in.shape.scale; });
  const Outputs scaled = run(in);
  EXPECT_LE(relative_error(scaled.o, added.o), tolerance(c).o);
  Tensor dg = scaled.dg.to(DType::kFloat64);
  dg.fill([&](int64_t b, int64_t t, int64_t h, int64_t) { return scaled.dg.at(b, t, h) / in.shape.scale; });
  EXPECT_LE(relative_error(dg, added.dg), tolerance(c).dbeta_dg);
}

TEST(Relations, P26_beta_zero_and_P28_w_zero_are_plain_attention) {
  for (const bool zero_beta : {true, false}) {
    Inputs in = make_inputs({.tokens = 300, .query_heads = 2, .w = zero_beta ? W::kUnit : W::kZero, .beta_to = zero_beta ? 0.0 : 2.0});
    const Outputs transformed = run(in);
    if (!zero_beta) {
      EXPECT_EQ(largest(transformed.dw), 0);
    }
    in.w = in.beta = {};
    const Outputs plain = run(in);
    const Tolerance bound = tolerance({});
    EXPECT_LE(relative_error(transformed.o, plain.o), bound.o);
    for (const auto member : {&Outputs::dq, &Outputs::dk, &Outputs::dv}) EXPECT_LE(relative_error(transformed.*member, plain.*member), bound.dqkv);
  }
}

TEST(Relations, P28_a_zero_row_of_w_has_no_gradient) {
  const Outputs out = run(make_inputs({.tokens = 150, .query_heads = 2, .w = W::kSomeZero}));
  for (int64_t t = 1; t < 150; t += 3) EXPECT_LE(largest(out.dw.rows(0, t, 1)), 1e-5 * largest(out.dw)) << t;
}

TEST(Relations, P09_gradients_scale_with_their_output_gradient) {
  const Inputs in = make_inputs({.tokens = 300, .query_heads = 2, .dtype = DType::kBFloat16, .gate = Gate::kMild});
  const Outputs want = expected(in), unscaled = run(in);
  for (const double factor : {0x1p-20, 0x1p40}) {
    Inputs scaled = in;
    scaled.d_o = in.d_o.to(DType::kBFloat16);
    scaled.d_o.fill([&](int64_t b, int64_t t, int64_t h, int64_t i) { return factor * in.d_o.at(b, t, h, i); });
    const Outputs got = run(scaled);
    for (const auto member : {&Outputs::dq, &Outputs::dk, &Outputs::dv, &Outputs::dw, &Outputs::dbeta, &Outputs::dg}) {
      Tensor scaled_want = (want.*member).to(DType::kFloat64);
      const Tensor& x = want.*member;
      scaled_want.fill([&](int64_t b, int64_t t, int64_t h, int64_t i) { return factor * x.at(b, t, h, i); });
      const double error = relative_error(got.*member, scaled_want), error_unscaled = relative_error(unscaled.*member, x);
      EXPECT_NEAR(error, error_unscaled, 0.1 * error_unscaled);
    }
  }
}

TEST(Relations, K07_gate_sums_do_not_lose_digits_far_from_the_start) {
  const int64_t tokens = 8192;
  Inputs in = make_inputs({.tokens = tokens, .key_width = 32, .value_width = 32, .gate = Gate::kZero});
  Tensor g(DType::kFloat32, {1, tokens, 1, 1});
  g.fill([x = 0u](auto...) mutable { return -0.5 - (x = x * 1664525u + 1013904223u) * 0x1p-32; });
  in.g = g;
  const Tensor last = forward(cpu_backend(2), in).o.rows(0, tokens - 64, 64);
  const Outputs want = expected(in.tokens(tokens - 1024, 1024), false);
  EXPECT_LE(relative_error(last, want.o.rows(0, 1024 - 64, 64)), 1e-5);
}

TEST(Relations, K20_strides_do_not_change_bits) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    const Inputs in = make_inputs({.batch = 2,
                                   .tokens = 90,
                                   .query_heads = 4,
                                   .key_heads = 2,
                                   .key_width = 40,
                                   .value_width = 24,
                                   .dtype = dtype,
                                   .gate = Gate::kMild,
                                   .with_d_lse = true});
    const Outputs contiguous = run(in);
    const DType compute = compute_type(dtype);
    for (const Layout layout : {Layout::kHeadsFirst, Layout::kFused}) {
      Inputs strided = in;
      strided.q = in.q.to(dtype, layout), strided.k = in.k.to(dtype, layout), strided.v = in.v.to(dtype, layout),
      strided.d_o = in.d_o.to(dtype, layout);
      strided.w = in.w.to(compute, layout), strided.beta = in.beta.to(compute, layout);
      strided.g = in.g.to(compute, layout), strided.d_lse = in.d_lse.to(compute, layout);
      expect_same_bits(run(strided, layout), contiguous);
    }
  }
}

TEST(Relations, F07_strides_of_zero) {
  const Case c{.batch = 2, .tokens = 90, .query_heads = 4, .key_heads = 2, .key_width = 40, .value_width = 24, .gate = Gate::kMild};
  Inputs expanded = make_inputs(c);
  expanded.d_o = Tensor(DType::kFloat32, expanded.d_o.shape(), View{}, 0, 24);  // one row for all
  expanded.d_o.fill([](auto...) { return 1; });
  expanded.k = Tensor(DType::kFloat32, expanded.k.shape(), View{.token_stride = 40}, 0, 90 * 40);  // the same for batches and heads
  expanded.k.fill([](int64_t, int64_t t, int64_t, int64_t i) { return std::sin(40 * t + i + 1); });
  expanded.beta = Tensor(DType::kFloat32, expanded.beta.shape(), View{}, 1, 2);  // one number, not aligned to 8 bytes
  expanded.beta.fill([](auto...) { return 1.25; });
  Inputs copied = expanded;
  copied.d_o = expanded.d_o.to(DType::kFloat32), copied.k = expanded.k.to(DType::kFloat32), copied.beta = expanded.beta.to(DType::kFloat32);
  expect_same_bits(run(expanded), run(copied));
}

TEST(Relations, P27_a_w_that_is_not_of_unit_length_is_taken_as_given) {
  Inputs in = make_inputs({.tokens = 100, .dtype = DType::kFloat64, .w_length = 1.4, .beta_to = 1});
  const Outputs given = run(in);
  in.w = in.w.to(DType::kFloat64), in.beta = in.beta.to(DType::kFloat64);
  for (int64_t t = 0; t < 100; ++t) {
    for (int64_t i = 0; i < 64; ++i) in.w.set(0, t, 0, i, in.w.at(0, t, 0, i) / 1.4);
    in.beta.set(0, t, 0, 0, in.beta.at(0, t, 0) * 1.4 * 1.4);
  }
  EXPECT_LE(relative_error(run(in).o, given.o), 1e-13);
}

// Rows of the tile before it may become NaN too, but never other numbers.
TEST(Relations, a_nan_reaches_the_rows_that_see_it) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Inputs clean = make_inputs(
        {.batch = 2, .tokens = 700, .query_heads = 2, .key_heads = 2, .key_width = 16, .value_width = 8, .dtype = dtype, .gate = Gate::kMild});
    const Outputs want = forward(cpu_backend(2), clean);
    for (Tensor Inputs::*member : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::w, &Inputs::beta, &Inputs::g}) {
      Inputs in = clean;
      in.*member = (clean.*member).to((clean.*member).dtype());
      (in.*member).set(1, 300, 1, 0, std::numeric_limits<double>::quiet_NaN());
      const Outputs got = forward(cpu_backend(2), in);
      EXPECT_TRUE(same_bits(got.o.rows(0, 0, 700), want.o.rows(0, 0, 700)));
      for (int64_t t = 0; t < 300; ++t) {
        EXPECT_TRUE(std::isnan(got.o.at(1, t, 1, 0)) || got.o.at(1, t, 1, 0) == want.o.at(1, t, 1, 0)) << "row " << t;
      }
      for (int64_t t = 300; t < 700; ++t) {
        EXPECT_EQ(got.o.at(1, t, 0, 0), want.o.at(1, t, 0, 0));
        if (t == 300 || member != &Inputs::q) {
          EXPECT_TRUE(std::isnan(got.o.at(1, t, 1, 0))) << "row " << t;
        }
      }
    }
  }
}

TEST(Relations, P24_workspaces_grow_linearly_with_the_number_of_tokens) {
  for (const int64_t width : {64, 128, 256}) {
    Problem p{.batch = 1, .query_heads = 8, .key_heads = 4, .key_width = width, .value_width = width, .scale = 1};
    for (p.tokens = 16384; p.tokens < 1 << 20; p.tokens *= 2) {
      Problem longer = p;
      longer.tokens *= 2;
      for (const bool has_w : {false, true}) {
        EXPECT_LE(cpu::forward_workspace_size(longer, has_w, 2), 2 * cpu::forward_workspace_size(p, has_w, 2)) << p.tokens;
        EXPECT_LE(cpu::backward_workspace_size(longer, has_w, 2), 2 * cpu::backward_workspace_size(p, has_w, 2)) << p.tokens;
        EXPECT_LE(cpu::prefill_workspace_size(longer, has_w, 2), 2 * cpu::prefill_workspace_size(p, has_w, 2)) << p.tokens;
        const size_t q_bytes = 4 * longer.tokens * longer.query_heads * width;
        EXPECT_LE(cpu::backward_workspace_size(longer, has_w, 2), 16 * q_bytes) << "width " << width << ", tokens " << longer.tokens;
      }
    }
  }
}

}  // namespace
}  // namespace pathattn::test
