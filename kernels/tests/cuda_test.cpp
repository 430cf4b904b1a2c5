// The CUDA paths against the float64 reference over the table of cases. Without a CUDA device every test is skipped, and counted as such.
#include <cmath>
#include <cstring>
#include <set>
#include <string>

#include "kernels/tests/cuda_backend.h"
#include "kernels/tests/expectations.h"
#include "kernels/tests/stick_breaking_backend.h"

namespace pathattn::test {
namespace {

// A table in the formats that CUDA devices take, each case with another format too where it has bfloat16.
std::vector<Case> device_cases(const std::vector<Case>& table) {
  std::vector<Case> chosen;
  for (const Case& c : table) {
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

// Scores of float16 operands, whatever the inputs' format.
Tolerance hopper_tolerance(const Case& c) {
  Tolerance bound = device_tolerance(c);
  bound.lse = c.beta_from > 1.9 ? 4e-3 : 2e-3;
  return bound;
}

void expect_case(const Case& c, const Backend& backend, Outputs (*expect)(const Inputs&), const Tolerance& bound) {
  if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  const Inputs in = make_inputs(c);
  Outputs got = forward(backend, in, c.layout);
  backward(backend, in, got, c.layout);
  const Outputs want = expect(in);
  expect_forward(got, want, bound);
  expect_gradients(got, want, bound);
  Outputs again = forward(backend, in, c.layout);
  backward(backend, in, again, c.layout);
  EXPECT_TRUE(same_bits(again, got)) << "other bits on another run";
}

Outputs path_expected(const Inputs& in) { return expected(in); }

class PortablePath : public testing::TestWithParam<Case> {};
TEST_P(PortablePath, values_gradients_and_bits) { expect_case(GetParam(), portable_cuda_backend(), path_expected, device_tolerance(GetParam())); }
INSTANTIATE_TEST_SUITE_P(Table, PortablePath, testing::ValuesIn(device_cases(cases())), [](const auto& info) { return info.param.name; });

class StickBreaking : public testing::TestWithParam<Case> {};
TEST_P(StickBreaking, values_gradients_and_bits) {
  expect_case(GetParam(), stick_breaking_cuda_backend(), stick_breaking_expected, device_tolerance(GetParam()));
}
INSTANTIATE_TEST_SUITE_P(Table, StickBreaking, testing::ValuesIn(device_cases(stick_breaking_cases())),
                         [](const auto& info) { return info.param.name; });

// The table's cases of widths that the Hopper path is for, each once in its two formats; on other devices they go the portable way.
std::vector<Case> hopper_cases() {
  std::vector<Case> chosen;
  std::set<std::string> names;
  const auto width = [](int64_t w) { return w == 64 || w == 128; };
  for (const Case& c : cases()) {
    if (!width(c.key_width) || !width(c.value_width)) continue;
    std::string name = c.name;
    for (const char* format : {"_f32", "_bf16", "_f64"})
      if (name.ends_with(format)) name.resize(name.size() - std::strlen(format));
    if (!names.insert(name).second) continue;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      chosen.push_back(c);
      chosen.back().name = name + (dtype == DType::kBFloat16 ? "_bfloat16" : "_float16");
      chosen.back().dtype = dtype;
    }
  }
  return chosen;
}

class HopperPath : public testing::TestWithParam<Case> {};
TEST_P(HopperPath, values_gradients_and_bits) { expect_case(GetParam(), cuda_backend(), path_expected, hopper_tolerance(GetParam())); }
INSTANTIATE_TEST_SUITE_P(Table, HopperPath, testing::ValuesIn(hopper_cases()), [](const auto& info) { return info.param.name; });

// o and what rounding took from it, together closer to the truth than any 16 bits are.
class CudaRest : public testing::TestWithParam<Gate> {};
TEST_P(CudaRest, is_what_rounding_took) {
  if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  for (const Backend& backend : {cuda_backend(), portable_cuda_backend()}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      const Case c{.name = "rest", .tokens = 300, .query_heads = 2, .key_width = 64, .value_width = 128, .dtype = dtype, .gate = GetParam()};
      const Inputs in = make_inputs(c);
      const Outputs got = forward(backend, in, Layout::kContiguous, /*with_rest=*/true), want = expected(in, /*with_gradients=*/false);
      Tensor sum = got.o.to(DType::kFloat64);
      sum.fill([&](int64_t b, int64_t t, int64_t h, int64_t i) { return got.o.at(b, t, h, i) + got.o_rest.at(b, t, h, i); });
      EXPECT_LE(relative_error(sum, want.o), dtype == DType::kBFloat16 ? relative_error(got.o, want.o) / 2 : relative_error(got.o, want.o))
          << backend.name;
      EXPECT_LE(relative_error(got.o, sum), unit_roundoff(dtype)) << backend.name;
      EXPECT_GE(relative_error(got.o, sum), unit_roundoff(dtype) / 10) << backend.name;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Gates, CudaRest, testing::Values(Gate::kMild, Gate::kNone),
                         [](const auto& info) { return info.param == Gate::kNone ? "none" : "mild"; });

// Several levels of nodes: too long for the reference, so against the portable path in float32 on the same numbers.
TEST(HopperLevels, agree_with_the_portable_path) {
  if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  for (const int64_t tokens : {4500, 20000}) {
    const Case c{.name = "levels",
                 .tokens = tokens,
                 .query_heads = 2,
                 .key_width = 128,
                 .value_width = 128,
                 .dtype = DType::kBFloat16,
                 .w = W::kRank2,
                 .beta_from = 1.999,
                 .beta_to = 1.999,
                 .gate = Gate::kMild};
    const Inputs in = make_inputs(c);
    const Outputs got = forward(cuda_backend(), in), want = forward(portable_cuda_backend(), in.to(DType::kFloat32));
    EXPECT_LE(relative_error(got.o, want.o), 3.8e-3) << tokens << " tokens";
    EXPECT_LE(largest_difference(got.lse, want.lse), hopper_tolerance(c).lse * (1 + largest(want.lse))) << tokens << " tokens";
  }
}

TEST(HopperLevels, gradients_agree_with_the_portable_path) {
  if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  for (const Gate gate : {Gate::kNone, Gate::kMild}) {
    const Case c{.name = "levels",
                 .tokens = 9000,
                 .query_heads = 2,
                 .key_heads = 1,
                 .key_width = 64,
                 .value_width = 128,
                 .dtype = DType::kBFloat16,
                 .gate = gate};
    const Inputs in = make_inputs(c), exact = in.to(DType::kFloat32);
    Outputs got = forward(cuda_backend(), in), want = forward(portable_cuda_backend(), exact);
    backward(cuda_backend(), in, got);
    backward(portable_cuda_backend(), exact, want);
    expect_forward(got, want, hopper_tolerance(c));
    expect_gradients(got, want, hopper_tolerance(c));
  }
}

// Scores that outgrow by thousands what a query meets in its own tile: forward looks for maxima there (attend.cuh).
TEST(HopperMaxima, of_growing_scores_are_found) {
  if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  for (const int64_t width : {64, 128}) {
    for (const Gate gate : {Gate::kNone, Gate::kMild}) {
      const Case c{
          .name = "maxima", .tokens = 1100, .key_width = width, .value_width = width, .dtype = DType::kBFloat16, .w = W::kNone, .gate = gate};
      Inputs in = make_inputs(c);
      in.k.fill([&](int64_t b, int64_t t, int64_t h, int64_t i) { return in.k.at(b, t, h, i) * std::exp2(static_cast<double>((1099 - t) / 128)); });
      const Outputs got = forward(cuda_backend(), in), want = expected(in, /*with_gradients=*/false);
      EXPECT_LE(relative_error(got.o, want.o), hopper_tolerance(c).o) << "width " << width;
      EXPECT_LE(largest_difference(got.lse, want.lse), hopper_tolerance(c).lse * (1 + largest(want.lse))) << "width " << width;
    }
  }
}

}  // namespace
}  // namespace pathattn::test
