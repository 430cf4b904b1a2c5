// Stick-breaking attention: the reference against the definition and finite differences, the CPU kernel against the reference, and runs that must
// agree with one another.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "kernels/cpu/stick_breaking.h"
#include "kernels/reference/stick_breaking.h"
#include "kernels/tests/expectations.h"
#include "kernels/tests/finite_differences.h"
#include "kernels/tests/stick_breaking_backend.h"

namespace pathattn::test {
namespace {

Case plain(Case c) {
  c.w = W::kNone;
  return c;
}

Outputs run(const Backend& backend, const Inputs& in, Layout layout = Layout::kContiguous) {
  Outputs out = forward(backend, in, layout);
  backward(backend, in, out, layout);
  return out;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Every factor of every weight written out.
TEST(StickBreakingReference, is_the_definition) {
  const Case c = plain(
      {.batch = 2, .tokens = 12, .query_heads = 4, .key_heads = 2, .key_width = 5, .value_width = 3, .dtype = DType::kFloat64, .cu_seqlens = {}});
  Case packed = c;
  packed.batch = 1, packed.cu_seqlens = {0, 5, 5, 12};
  for (const Case& each : {c, packed}) {
    const Inputs in = make_inputs(each);
    const Outputs got = forward(stick_breaking_reference(), in);
    const auto logit = [&](int64_t b, int64_t i, int64_t j, int64_t head) {
      double sum = 0;
      for (int64_t x = 0; x < 5; ++x) sum += in.q.at(b, i, head, x) * in.k.at(b, j, head / 2, x);
      return in.shape.scale * sum;
    };
    for (int64_t b = 0; b < each.batch; ++b) {
      for (int64_t head = 0; head < 4; ++head) {
        for (int64_t i = 0; i < 12; ++i) {
          const int64_t first = each.cu_seqlens.empty() || i < 5 ? 0 : 5;
          double sum = 0;
          std::vector<double> o(3);
          for (int64_t j = first; j < i; ++j) {
            double weight = sigmoid(logit(b, i, j, head));
            for (int64_t l = j + 1; l < i; ++l) weight *= 1 - sigmoid(logit(b, i, l, head));
            sum += weight;
            for (int64_t x = 0; x < 3; ++x) o[x] += weight * in.v.at(b, j, head / 2, x);
          }
          EXPECT_NEAR(got.lse.at(b, i, head), 1 - sum, 1e-14);
          for (int64_t x = 0; x < 3; ++x) EXPECT_NEAR(got.o.at(b, i, head, x), o[x], 1e-14);
        }
      }
    }
  }
}

TEST(StickBreakingReference, gradients_are_finite_differences) {
  const Case c = plain({.batch = 2, .tokens = 7, .query_heads = 4, .key_heads = 2, .key_width = 4, .value_width = 3, .dtype = DType::kFloat64});
  Case through_rest = c;
  through_rest.with_d_lse = true;
  Case documents = through_rest;
  documents.batch = 1, documents.tokens = 11, documents.cu_seqlens = {0, 0, 5, 6, 11};
  for (const Case& each : {c, through_rest, documents}) {
    const Inputs in = make_inputs(each);
    const Outputs out = run(stick_breaking_reference(), in);
    expect_derivative(stick_breaking_reference(), in, &Inputs::q, out.dq);
    expect_derivative(stick_breaking_reference(), in, &Inputs::k, out.dk);
    expect_derivative(stick_breaking_reference(), in, &Inputs::v, out.dv);
  }
}

class StickBreaking : public testing::TestWithParam<Case> {};
TEST_P(StickBreaking, values_gradients_and_bits) {
  const Case& c = GetParam();
  const Inputs in = make_inputs(c);
  const Outputs got = run(stick_breaking_cpu(), in, c.layout), want = stick_breaking_expected(in);
  const Tolerance bound = tolerance(c);
  expect_forward(got, want, bound);
  expect_gradients(got, want, bound);
  EXPECT_TRUE(same_bits(run(stick_breaking_cpu(3), in, c.layout), got)) << "other bits with three workers";
  EXPECT_TRUE(same_bits(run(stick_breaking_cpu(5, Workers::Order::kReversed), in, c.layout), got)) << "other bits in another order";
}
INSTANTIATE_TEST_SUITE_P(Table, StickBreaking, testing::ValuesIn(stick_breaking_cases()), [](const auto& info) { return info.param.name; });

// Logits moved by `offset` and stretched: sticks that snap at once, that hardly break over thousands of keys, and anything between.
Inputs with_logits(double stretch, double offset, const Case& c) {
  Inputs in = make_inputs(c);
  const double root = std::sqrt(std::abs(offset / in.shape.scale));
  in.q.fill([&, q = in.q.to(c.dtype)](int64_t b, int64_t t, int64_t h, int64_t i) {
    return i == 0 ? std::copysign(root, offset) : stretch * q.at(b, t, h, i);
  });
  in.k.fill([&, k = in.k.to(c.dtype)](int64_t b, int64_t t, int64_t h, int64_t i) { return i == 0 ? root : k.at(b, t, h, i); });
  return in;
}

TEST(StickBreakingLogits, of_any_size_keep_their_accuracy) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const auto& [stretch, offset] : {std::pair<double, double>{1, -8}, {0, -8}, {0, -12}, {1, 8}, {30, 0}, {100, 0}, {1, -200}, {1, 200}}) {
      const Case c = plain({.tokens = 2100, .key_width = 32, .value_width = 16, .dtype = dtype, .with_d_lse = true});
      const Inputs in = with_logits(stretch, offset, c);
      const Outputs got = run(stick_breaking_cpu(2), in), want = stick_breaking_expected(in);
      SCOPED_TRACE("stretch " + std::to_string(stretch) + ", offset " + std::to_string(offset));
      expect_forward(got, want, tolerance(c));
      expect_gradients(got, want, tolerance(c));
    }
  }
}

TEST(StickBreakingLogits, of_equal_size_leave_a_geometric_rest) {
  Inputs in = make_inputs(plain({.tokens = 700, .key_width = 8, .value_width = 8, .dtype = DType::kFloat64}));
  in.q.fill([](auto...) { return 0; });
  const Outputs out = forward(stick_breaking_cpu(), in);
  for (int64_t t = 0; t < 700; ++t) EXPECT_EQ(out.lse.at(0, t, 0), std::exp2(-t));
}

TEST(StickBreakingRelations, documents_and_batch_rows_equal_their_runs_alone) {
  const Case batches = plain({.batch = 3, .tokens = 300, .query_heads = 4, .key_heads = 2, .with_d_lse = true});
  Case packed = batches;
  packed.batch = 1, packed.cu_seqlens = {0, 0, 63, 64, 64, 300};
  for (const Case& c : {batches, packed}) {
    const Inputs in = make_inputs(c);
    const Outputs together = run(stick_breaking_cpu(2), in);
    for (int64_t n = 0; n < in.num_documents(); ++n) {
      const int64_t b = c.cu_seqlens.empty() ? n : 0, first = c.cu_seqlens.empty() ? 0 : c.cu_seqlens[n];
      const Inputs one = in.document(n);
      if (one.shape.tokens == 0) continue;
      const Outputs alone = run(stick_breaking_cpu(2), one);
      for (const auto member : {&Outputs::o, &Outputs::lse, &Outputs::dq, &Outputs::dk, &Outputs::dv}) {
        EXPECT_TRUE(same_bits((together.*member).rows(b, first, one.shape.tokens), alone.*member)) << "document " << n;
      }
    }
  }
}

TEST(StickBreakingRelations, a_nan_reaches_the_rows_that_see_it) {
  const Case c = plain({.batch = 2, .tokens = 300, .query_heads = 2, .key_heads = 2, .key_width = 16, .value_width = 8});
  const Inputs clean = make_inputs(c);
  const Outputs want = forward(stick_breaking_cpu(), clean);
  for (Tensor Inputs::*member : {&Inputs::q, &Inputs::k, &Inputs::v}) {
    Inputs in = clean;
    in.*member = (clean.*member).to(DType::kFloat32);
    (in.*member).set(1, 150, 1, 0, std::numeric_limits<double>::quiet_NaN());
    const Outputs got = forward(stick_breaking_cpu(), in);
    EXPECT_TRUE(same_bits(got.o.rows(0, 0, 300), want.o.rows(0, 0, 300)));
    for (int64_t t = 0; t < 300; ++t) {
      EXPECT_EQ(got.o.at(1, t, 0, 0), want.o.at(1, t, 0, 0));
      const bool sees = member == &Inputs::q ? t == 150 : t > 150;
      // Rows of its tile before it may become NaN too, but never other numbers.
      const bool may = sees || t >= 128, is = std::isnan(got.o.at(1, t, 1, 0));
      EXPECT_TRUE(sees ? is : (may && is) || got.o.at(1, t, 1, 0) == want.o.at(1, t, 1, 0)) << "row " << t;
    }
  }
}

TEST(StickBreakingWorkspace, grows_linearly_with_the_number_of_tokens) {
  Problem p{.batch = 1, .tokens = 16384, .query_heads = 8, .key_heads = 4, .key_width = 64, .value_width = 64, .scale = 1};
  Problem longer = p;
  longer.tokens *= 2;
  EXPECT_LE(cpu::stick_breaking_forward_workspace_size(longer, 2), 2.1 * cpu::stick_breaking_forward_workspace_size(p, 2));
  EXPECT_LE(cpu::stick_breaking_backward_workspace_size(longer, 2), 2.1 * cpu::stick_breaking_backward_workspace_size(p, 2));
}

TEST(StickBreakingArguments, are_refused_with_what_is_wrong) {
  const Inputs in = make_inputs(plain({.tokens = 3}));
  Outputs out = run(stick_breaking_cpu(), in);
  const StickBreakingForwardArguments good = stick_breaking_arguments(forward_arguments(in, out));
  const StickBreakingBackwardArguments good_backward = stick_breaking_arguments(backward_arguments(in, out));
  const auto message = [](const auto& arguments) { return std::string(check(arguments).message); };
  EXPECT_TRUE(check(good).ok());
  EXPECT_TRUE(check(good_backward).ok());
  EXPECT_STREQ(reference::stick_breaking_forward(good).message, "the reference takes float64");
  auto forward = good;
  forward.k = {};
  EXPECT_EQ(message(forward), "k is missing");
  forward = good, forward.rest = {};
  EXPECT_EQ(message(forward), "rest is missing");
  forward = good, forward.problem.key_width = 257;
  EXPECT_EQ(message(forward), "the width of q and k must be 1 ... 256");
  EXPECT_EQ(cpu::stick_breaking_forward_workspace_size(forward.problem, 1), 0u);
  EXPECT_FALSE(cpu::stick_breaking_forward(forward, nullptr, Workers(1).executor()).ok());
  auto backward = good_backward;
  backward.d_o = {};
  EXPECT_EQ(message(backward), "d_o is missing");
  backward = good_backward, backward.dv = {};
  EXPECT_EQ(message(backward), "dv is missing");
  backward = good_backward, backward.d_rest = {};
  EXPECT_TRUE(check(backward).ok());
}

}  // namespace
}  // namespace pathattn::test
