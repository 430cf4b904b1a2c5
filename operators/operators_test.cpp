// What C++ callers rely on: gradients by backward(), no copies of strided inputs, and results that Python's test compares bit by bit.
#include "operators/path_attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <fstream>

#include "operators/arguments.h"

namespace pathattn {
namespace {

at::Tensor ramp(int64_t step, at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes)).mul(step).remainder(1009).to(at::kFloat).div(1009).sub(0.5).view(sizes);
}

struct Example {
  at::Tensor q = ramp(7, {2, 70, 4, 16}), k = ramp(11, {2, 70, 2, 16}), v = ramp(13, {2, 70, 2, 24});
  at::Tensor w = ramp(17, {2, 70, 2, 16}), beta = ramp(19, {2, 70, 2}).add(0.5), g = ramp(23, {2, 70, 4}).sub(0.5);
  std::vector<at::Tensor> all() const { return {q, k, v, w, beta, g}; }
};

TEST(PathAttention, is_differentiable_from_cpp) {
  Example in;
  for (at::Tensor& x : in.all()) x.requires_grad_();
  const auto [o, lse] = path_attention(in.q, in.k, in.v, in.w, in.beta, in.g, std::nullopt, std::nullopt, false);
  torch::autograd::backward({o, lse}, {at::ones_like(o), at::ones_like(lse)});
  for (const at::Tensor& x : in.all()) EXPECT_EQ(x.grad().sizes(), x.sizes());
}

// Python's test_cpp_gives_the_same_bits reads the file and compares.
TEST(PathAttention, writes_results_for_python) {
  Example in;
  for (at::Tensor& x : in.all()) x.requires_grad_();
  const auto [o, lse] = path_attention(in.q, in.k, in.v, in.w, in.beta, in.g, std::nullopt, std::nullopt, false);
  std::vector<at::Tensor> results = torch::autograd::grad({o, lse}, in.all(), {at::ones_like(o), at::ones_like(lse)});
  results.insert(results.begin(), {o, lse});
  std::ofstream file(PATHATTN_BINARY_DIR "/operators_test_results.bin", std::ios::binary);
  for (const at::Tensor& x : results) {
    const at::Tensor data = x.detach().contiguous();
    file.write(reinterpret_cast<const char*>(data.const_data_ptr<float>()), data.nbytes());
  }
  ASSERT_TRUE(file.good());
}

TEST(PathAttention, strided_inputs_are_read_in_place) {
  const at::Tensor fused = at::randn({2, 70, 8, 16});
  const std::vector<at::Tensor> parts = fused.split_with_sizes({4, 2, 2}, 2);
  const std::optional<at::Tensor> none;
  const operators::KernelInputs in(operators::Inputs{parts[0], parts[1], parts[2], none, none, none, std::nullopt, none, false});
  EXPECT_EQ(in.q.const_data_ptr(), parts[0].const_data_ptr());
  EXPECT_EQ(in.k.const_data_ptr(), parts[1].const_data_ptr());
  EXPECT_EQ(in.v.const_data_ptr(), parts[2].const_data_ptr());
  EXPECT_EQ(operators::const_view(in.k).token_stride, 8 * 16);
}

TEST(Decode, continues_prefill) {
  const Example in;
  const auto rows = [&](const at::Tensor& x, int64_t first, int64_t last) { return x.slice(1, first, last); };
  auto state = DecodingTensors::create(2, 70, 4, 2, 16, 24, at::kFloat, true, true);
  const auto [o, lse] = path_attention(in.q, in.k, in.v, in.w, in.beta, in.g, std::nullopt, std::nullopt, false);
  const auto prompt = prefill(rows(in.q, 0, 50), rows(in.k, 0, 50), rows(in.v, 0, 50), rows(in.w, 0, 50), rows(in.beta, 0, 50), rows(in.g, 0, 50),
                              std::nullopt, std::nullopt, false, state);
  const auto rest = decode(rows(in.q, 50, 70), rows(in.k, 50, 70), rows(in.v, 50, 70), rows(in.w, 50, 70), rows(in.beta, 50, 70), rows(in.g, 50, 70),
                           std::nullopt, false, state);
  EXPECT_LT(at::cat({prompt, rest}, 1).sub(o).norm().item<double>(), 1e-5 * o.norm().item<double>());
  EXPECT_EQ(state.lengths[1].item<int64_t>(), 70);
}

TEST(Decode, refuses_a_full_state_by_an_error_that_leaves_it) {
  const Example in;
  auto state = DecodingTensors::create(2, 60, 4, 2, 16, 24, at::kFloat, false, false);
  const at::Tensor q = at::randn({2, 513, 4, 16}), k = at::randn({2, 513, 2, 16}), v = at::randn({2, 513, 2, 24});
  EXPECT_THROW(decode(q, k, v, {}, {}, {}, {}, false, state), c10::Error);
  EXPECT_EQ(state.lengths.sum().item<int64_t>(), 0);
}

}  // namespace
}  // namespace pathattn
