// The portable CUDA path against the float64 reference over the table of cases. Without a CUDA device every test is skipped, and counted as such.
#include "kernels/tests/cuda_backend.h"
#include "kernels/tests/expectations.h"

namespace pathattn::test {
namespace {

// The table in the formats that CUDA devices take, each case with another format too where it has bfloat16.
std::vector<Case> device_cases() {
  std::vector<Case> chosen;
  for (const Case& c : cases()) {
    if (c.dtype == DType::kFloat64) continue;
    chosen.push_back(c);
    if (c.dtype != DType::kBFloat16) continue;
    chosen.push_back(c);
    chosen.back().name += "_as_float16";
    chosen.back().dtype = DType::kFloat16;
  }
  return chosen;
}

// Sums run in another order than on a CPU.
Tolerance device_tolerance(const Case& c) {
  Tolerance bound = tolerance(c);
  bound.dbeta_dg *= 1.5;
  return bound;
}

class CudaCases : public testing::TestWithParam<Case> {};

TEST_P(CudaCases, values_gradients_and_bits) {
  if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  const Case& c = GetParam();
  const Inputs in = make_inputs(c);
  Outputs got = forward(cuda_backend(), in, c.layout);
  backward(cuda_backend(), in, got, c.layout);
  const Outputs want = expected(in);
  expect_forward(got, want, device_tolerance(c));
  expect_gradients(got, want, device_tolerance(c));
  Outputs again = forward(cuda_backend(), in, c.layout);
  backward(cuda_backend(), in, again, c.layout);
  EXPECT_TRUE(same_bits(again, got)) << "other bits on another run";
}

INSTANTIATE_TEST_SUITE_P(Portable, CudaCases, testing::ValuesIn(device_cases()), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace pathattn::test
