// Arguments that no backend may accept: each is refused with its own message before anything is written.
#include "kernels/problem.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/tests/cases.h"

namespace pathattn::test {
namespace {

class Check : public testing::Test {
 protected:
  Check() : in(make_inputs({.tokens = 6, .query_heads = 4, .key_heads = 2, .key_width = 8, .value_width = 8, .gate = Gate::kMild})) {
    out = forward(cpu_backend(), in);
    backward(cpu_backend(), in, out);
    forward_ = forward_arguments(in, out);
    backward_ = backward_arguments(in, out);
  }

  void expect_refused(const std::string& words, int64_t value = 0) const {
    for (const Status& status : {check(forward_with_problem()), cpu_backend().forward(forward_with_problem())}) {
      ASSERT_FALSE(status.ok()) << "accepted, should say: " << words;
      EXPECT_NE(std::string(status.message).find(words), std::string::npos) << status.message;
      EXPECT_EQ(status.value, value) << status.message;
    }
    EXPECT_FALSE(check(backward_with_problem()).ok());
  }

  ForwardArguments forward_with_problem() const {
    ForwardArguments a = forward_;
    a.problem = problem;
    return a;
  }
  BackwardArguments backward_with_problem() const {
    BackwardArguments a = backward_;
    a.problem = problem;
    return a;
  }

  Inputs in;
  Outputs out;
  ForwardArguments forward_;
  BackwardArguments backward_;
  Problem problem = in.problem();
};

TEST_F(Check, shapes) {
  const Problem right = problem;
  problem.query_heads = 3, expect_refused("multiple of key_heads", 3), problem = right;
  problem.query_heads = 0, expect_refused("query_heads must be at least 1", 0), problem = right;
  problem.key_heads = 0, expect_refused("key_heads must be at least 1", 0), problem = right;
  problem.key_heads = -2, expect_refused("key_heads must be at least 1", -2), problem = right;
  problem.batch = -1, expect_refused("batch", -1), problem = right;
  problem.tokens = -1, expect_refused("tokens", -1), problem = right;
  problem.scale = std::numeric_limits<double>::quiet_NaN(), expect_refused("scale must be finite"), problem = right;
  problem.scale = std::numeric_limits<double>::infinity(), expect_refused("scale must be finite"), problem = right;
  problem.dtype = static_cast<DType>(9), expect_refused("dtype", 9), problem = right;
}

TEST_F(Check, F12_widths_that_are_not_supported_name_the_ones_that_are) {
  const Problem right = problem;
  for (const int64_t width : {int64_t{0}, int64_t{-1}, int64_t{257}, std::numeric_limits<int64_t>::max()}) {
    problem.key_width = width, expect_refused("the width of q and k must be 1 ... 256", width), problem = right;
    problem.value_width = width, expect_refused("the width of v must be 1 ... 256", width), problem = right;
  }
}

TEST_F(Check, K10_malformed_cu_seqlens) {
  const auto refuse = [&](std::vector<int64_t> cu_seqlens, int64_t documents, const std::string& words, int64_t value) {
    problem.cu_seqlens = cu_seqlens.data(), problem.num_documents = documents;
    expect_refused(words, value);
  };
  refuse({1, 6}, 1, "start with 0", 1);
  refuse({0, 4, 3, 6}, 3, "not decrease", 3);
  refuse({0, 5}, 1, "number of tokens", 5);
  refuse({0, 7}, 1, "number of tokens", 7);
  refuse({0, -1, 6}, 2, "not decrease", -1);
  refuse({0}, 0, "number of tokens", 0);
  refuse({0}, -1, "at least one entry", 0);
  problem.batch = 2;
  refuse({0, 6}, 1, "batch 1", 2);
  problem.batch = 1, problem.cu_seqlens = nullptr, problem.num_documents = 1;
  expect_refused("num_documents needs cu_seqlens", 1);
}

TEST_F(Check, missing_tensors) {
  const ForwardArguments right = forward_;
  const auto refuse = [&](auto member, const char* words) {
    forward_.*member = {};
    const Status status = cpu_backend().forward(forward_);
    ASSERT_FALSE(status.ok()) << words;
    EXPECT_STREQ(status.message, words);
    forward_ = right;
  };
  refuse(&ForwardArguments::q, "q is missing");
  refuse(&ForwardArguments::k, "k is missing");
  refuse(&ForwardArguments::v, "v is missing");
  refuse(&ForwardArguments::w, "beta needs w");
  refuse(&ForwardArguments::beta, "w needs beta");
  refuse(&ForwardArguments::o, "o is missing");
  refuse(&ForwardArguments::lse, "lse is missing");
}

TEST_F(Check, missing_tensors_of_backward) {
  const BackwardArguments right = backward_;
  const auto refuse = [&](auto member, const char* words) {
    backward_.*member = {};
    const Status status = cpu_backend().backward(backward_);
    ASSERT_FALSE(status.ok()) << words;
    EXPECT_STREQ(status.message, words);
    backward_ = right;
  };
  refuse(&BackwardArguments::q, "q is missing");
  refuse(&BackwardArguments::k, "k is missing");
  refuse(&BackwardArguments::v, "v is missing");
  refuse(&BackwardArguments::w, "beta needs w");
  refuse(&BackwardArguments::beta, "w needs beta");
  refuse(&BackwardArguments::g, "dg must be given if and only if g is");
  refuse(&BackwardArguments::o, "o is missing");
  refuse(&BackwardArguments::lse, "lse is missing");
  refuse(&BackwardArguments::d_o, "d_o is missing");
  refuse(&BackwardArguments::dq, "dq is missing");
  refuse(&BackwardArguments::dk, "dk is missing");
  refuse(&BackwardArguments::dv, "dv is missing");
  refuse(&BackwardArguments::dw, "dw must be given if and only if w is");
  refuse(&BackwardArguments::dbeta, "dbeta must be given if and only if beta is");
  refuse(&BackwardArguments::dg, "dg must be given if and only if g is");
}

TEST_F(Check, a_refused_call_writes_nothing) {
  const Tensor o(DType::kFloat32, out.o.shape()), lse(DType::kFloat32, out.lse.shape());
  ForwardArguments a = forward_;
  a.o = o.out(), a.lse = lse.out();
  a.beta = {};
  EXPECT_FALSE(cpu_backend().forward(a).ok());
  const Tensor untouched_o(DType::kFloat32, out.o.shape()), untouched_lse(DType::kFloat32, out.lse.shape());
  EXPECT_EQ(std::memcmp(o.out().data, untouched_o.out().data, o.shape().size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(lse.out().data, untouched_lse.out().data, lse.shape().size() * sizeof(float)), 0);
}

TEST_F(Check, nothing_to_do_is_no_error) {
  problem.tokens = 0;
  ForwardArguments nothing;
  nothing.problem = problem;
  EXPECT_TRUE(check(nothing).ok());
  EXPECT_TRUE(cpu_backend(2).forward(nothing).ok());
  BackwardArguments nothing_back;
  nothing_back.problem = problem;
  EXPECT_TRUE(cpu_backend(2).backward(nothing_back).ok());
  const int64_t empty_documents[] = {0, 0, 0};
  nothing.problem.cu_seqlens = nothing_back.problem.cu_seqlens = empty_documents;
  nothing.problem.num_documents = nothing_back.problem.num_documents = 2;
  EXPECT_TRUE(cpu_backend(2).forward(nothing).ok());
  EXPECT_TRUE(cpu_backend(2).backward(nothing_back).ok());
  problem.tokens = 6, problem.batch = 0;
  nothing.problem = nothing_back.problem = problem;
  EXPECT_TRUE(cpu_backend(2).forward(nothing).ok());
  EXPECT_TRUE(cpu_backend(2).backward(nothing_back).ok());
}

}  // namespace
}  // namespace pathattn::test
