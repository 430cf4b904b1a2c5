// Every backend against the float64 reference over the table of cases: values, memory around the outputs, and the same bits for any workers.
#include "kernels/tests/cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>

namespace pathattn::test {

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

namespace {

void expect_near(const char* name, const Tensor& got, const Tensor& want, double bound) {
  ASSERT_EQ(got.empty(), want.empty()) << name;
  if (got.empty()) return;
  // Gradients of a document's only token vanish; what a format leaves of them is compared with the inputs' size, 1.
  if (largest(want) < 1e-12) {
    EXPECT_LE(largest(got), got.dtype() == DType::kFloat64 ? 1e-13 : 1e-5) << name;
  } else {
    EXPECT_LE(relative_error(got, want), bound) << name << ", largest difference " << largest_difference(got, want);
  }
}

std::vector<Backend> other_schedules() {
  return {cpu_backend(1), cpu_backend(2), cpu_backend(3), cpu_backend(7), cpu_backend(2, Workers::Order::kReversed)};
}

class Cases : public testing::TestWithParam<Case> {};

TEST_P(Cases, test) {
  const Case& c = GetParam();
  const Inputs in = make_inputs(c);
  const Outputs want = expected(in, /*with_gradients=*/false), got = forward(cpu_backend(), in, c.layout);
  const Tolerance bound = tolerance(c);
  expect_near("o", got.o, want.o, bound.o);
  EXPECT_LE(largest_difference(got.lse, want.lse), bound.lse * (1 + largest(want.lse))) << "lse";
  for (const Backend& backend : other_schedules()) {
    const Outputs again = forward(backend, in, c.layout);
    EXPECT_TRUE(same_bits(again.o, got.o) && same_bits(again.lse, got.lse)) << "other bits on another run";
  }
}

TEST_P(Cases, grad) {
  const Case& c = GetParam();
  const Inputs in = make_inputs(c);
  const Outputs want = expected(in);
  Outputs got = forward(cpu_backend(), in, c.layout);
  backward(cpu_backend(), in, got, c.layout);
  const Tolerance bound = tolerance(c);
  expect_near("dq", got.dq, want.dq, bound.dqkv);
  expect_near("dk", got.dk, want.dk, bound.dqkv);
  expect_near("dv", got.dv, want.dv, bound.dqkv);
  expect_near("dw", got.dw, want.dw, bound.dw);
  expect_near("dbeta", got.dbeta, want.dbeta, bound.dbeta_dg);
  expect_near("dg", got.dg, want.dg, bound.dbeta_dg);
  for (const Backend& backend : other_schedules()) {
    Outputs again = got;
    backward(backend, in, again, c.layout);
    EXPECT_TRUE(same_bits(again.dq, got.dq) && same_bits(again.dk, got.dk) && same_bits(again.dv, got.dv) && same_bits(again.dw, got.dw) &&
                same_bits(again.dbeta, got.dbeta) && same_bits(again.dg, got.dg))
        << "other bits on another run";
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Cases, testing::ValuesIn(cases()), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace pathattn::test
