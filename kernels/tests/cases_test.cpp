// The CPU kernels against the float64 reference over the table of cases: values, memory around the outputs, and the same bits for any workers.
#include <algorithm>

#include "kernels/tests/expectations.h"

namespace pathattn::test {
namespace {

std::vector<Backend> other_schedules() {
  return {cpu_backend(1), cpu_backend(2), cpu_backend(3), cpu_backend(7), cpu_backend(2, Workers::Order::kReversed)};
}

class Cases : public testing::TestWithParam<Case> {};

TEST_P(Cases, test) {
  const Case& c = GetParam();
  const Inputs in = make_inputs(c);
  const Outputs got = forward(cpu_backend(), in, c.layout);
  expect_forward(got, expected(in, /*with_gradients=*/false), tolerance(c));
  for (const Backend& backend : other_schedules()) EXPECT_TRUE(same_bits(forward(backend, in, c.layout), got)) << "other bits on another run";
}

TEST_P(Cases, grad) {
  const Case& c = GetParam();
  const Inputs in = make_inputs(c);
  Outputs got = forward(cpu_backend(), in, c.layout);
  backward(cpu_backend(), in, got, c.layout);
  expect_gradients(got, expected(in), tolerance(c));
  for (const Backend& backend : other_schedules()) {
    Outputs again = got;
    backward(backend, in, again, c.layout);
    EXPECT_TRUE(same_bits(again, got)) << "other bits on another run";
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Cases, testing::ValuesIn(cases()), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace pathattn::test
