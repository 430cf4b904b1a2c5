// Calls of prefill and decode that must agree bit for bit, whatever lies beside or beyond their tokens, and calls that are refused.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/tests/decoding.h"

namespace pathattn::test {
namespace {

Tensor batch_row(const Tensor& x, int64_t b) { return x.rows(b, 0, x.shape().tokens); }

TEST(DecodeRelations, F17_several_tokens_are_the_same_as_one_by_one) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{4, 3}, {100, 5}, {64, 64}, {63, 2}, {505, 30}}) {
      Case c = small_case(first + count);
      c.dtype = dtype;
      const Inputs in = make_inputs(c);
      const State together(in, 1024), one_by_one(in, 1024);
      prefill(in.tokens(0, first), together);
      prefill(in.tokens(0, first), one_by_one);
      const Outputs all = decode(in.tokens(first, count), together);
      for (int64_t t = 0; t < count; ++t) {
        const Outputs one = decode(in.tokens(first + t, 1), one_by_one);
        EXPECT_TRUE(same_bits(one.o, all.o.rows(0, t, 1)) && same_bits(one.lse, all.lse.rows(0, t, 1))) << first << "+" << count << " at " << t;
      }
      EXPECT_EQ(together.bytes(), one_by_one.bytes()) << first << "+" << count;
    }
  }
}

TEST(DecodeRelations, F01_nothing_beyond_the_length_is_read) {
  for (const W w : {W::kUnit, W::kNone}) {
    Case c = small_case(700);
    c.w = w;
    const Inputs in = make_inputs(c);
    for (const int64_t first : {100, 512, 600}) {
      Outputs of_zeros;
      for (const int fill : {0, 0xff, 0x7f}) {  // zeros, NaN, 3e38
        const State state(in, 1024, std::byte(fill));
        prefill(in.tokens(0, first), state);
        const Outputs got = decode(in.tokens(first, 3), state);
        if (fill == 0) of_zeros = got;
        EXPECT_TRUE(same_bits(got.o, of_zeros.o) && same_bits(got.lse, of_zeros.lse)) << first;
      }
    }
  }
}

TEST(DecodeRelations, P17_a_refused_call_changes_nothing) {
  const Inputs in = make_inputs(small_case(520));
  const State state(in, 512);
  prefill(in.tokens(0, 510), state);
  const std::vector<std::byte> before = state.bytes();
  const Inputs next = in.tokens(510, 1);
  Outputs out;
  out.o = Tensor(DType::kFloat32, {1, 1, 2, 8}), out.lse = Tensor(DType::kFloat32, {1, 1, 2, 1});
  const Executor executor = Workers(1).executor();
  std::vector<double> workspace(1 << 20);
  const auto refused = [&](auto change, const char* why) {
    ForwardArguments a = forward_arguments(next, out);
    DecodingState view = state.view();
    change(a, view);
    const Status status = cpu::decode(a, view, workspace.data(), executor);
    EXPECT_FALSE(status.ok()) << why;
    EXPECT_NE(std::string(status.message ? status.message : "").find(why), std::string::npos) << (status.message ? status.message : "accepted");
    EXPECT_TRUE(state.bytes() == before) << why;
  };
  refused([](ForwardArguments& a, DecodingState&) { a.problem.key_width = 8; }, "width of q and k");
  refused([](ForwardArguments& a, DecodingState&) { a.problem.value_width = 16; }, "width of v");
  refused([](ForwardArguments& a, DecodingState&) { a.problem.query_heads = 4; }, "query heads");
  refused([](ForwardArguments& a, DecodingState&) { a.problem.key_heads = 2; }, "key heads");
  refused([](ForwardArguments& a, DecodingState&) { a.problem.dtype = DType::kBFloat16; }, "dtype");
  refused([](ForwardArguments& a, DecodingState&) { a.problem.batch = 2; }, "one sequence for each");
  refused([](ForwardArguments& a, DecodingState&) { a.problem.tokens = 3; }, "room for");
  refused([](ForwardArguments& a, DecodingState&) { a.problem.tokens = std::numeric_limits<int64_t>::max(); }, "room for");
  refused([](ForwardArguments& a, DecodingState&) { a.w = {}; }, "beta needs w");
  refused([](ForwardArguments& a, DecodingState&) { a.w = a.beta = {}; }, "carries");
  refused([](ForwardArguments& a, DecodingState&) { a.g = {}; }, "gate sums");
  refused([](ForwardArguments& a, DecodingState&) { a.q = {}; }, "q is missing");
  refused([](ForwardArguments&, DecodingState& view) { view.key_width = 300; }, "1 ... 256");
  refused([](ForwardArguments&, DecodingState& view) { view.key_heads = 0; }, "multiple of its key_heads");
  refused([](ForwardArguments&, DecodingState& view) { view.capacity = 513; }, "multiple of 512");
  refused([](ForwardArguments&, DecodingState& view) { view.open_carry = nullptr; }, "all or none");
  refused([](ForwardArguments&, DecodingState& view) { view.lengths = nullptr; }, "lengths");
  const int64_t offsets[] = {0, 1};
  refused([&](ForwardArguments& a, DecodingState&) { a.problem.cu_seqlens = offsets, a.problem.num_documents = 1; }, "cu_seqlens");

  const State untouched(in, 512);
  prefill(in.tokens(0, 510), untouched);
  EXPECT_TRUE(same_bits(decode(next, state).o, decode(next, untouched).o));
  EXPECT_THROW(prefill(in.tokens(0, 10), state), std::runtime_error);
  EXPECT_THROW(prefill(in, State(in, 512)), std::runtime_error);
}

// Documents of these lengths in one prefill, then common steps: against each document alone, bit for bit.
TEST(DecodeRelations, F14_K17_a_sequence_does_not_see_its_neighbours) {
  const std::vector<int64_t> lengths = {3, 0, 5, 300, 1, 512, 64, 515, 0, 1030};
  const int64_t n = static_cast<int64_t>(lengths.size()), steps = 12;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Case c{.name = "", .query_heads = 4, .key_heads = 2, .key_width = 24, .value_width = 40, .dtype = dtype, .gate = Gate::kMild, .cu_seqlens = {0}};
    for (const int64_t length : lengths) c.cu_seqlens.push_back(c.cu_seqlens.back() + length);
    c.tokens = c.cu_seqlens.back();
    const Inputs prompts = make_inputs(c);
    c.batch = n, c.tokens = steps, c.cu_seqlens.clear(), c.seed = 2;
    const Inputs next = make_inputs(c);
    const State state(prompts, 1536);
    prefill(prompts, state, 2);
    const Outputs got = decode(next, state, 2);
    const Tensor keys = carried_keys(state, 1536, 2);
    for (int64_t i = 0; i < n; ++i) {
      const Inputs prompt = prompts.document(i);
      const State alone(prompt, 1536);
      if (lengths[i] > 0) prefill(prompt, alone);
      for (int64_t t = 0; t < steps; ++t) {
        const Outputs one = decode(next.document(i).tokens(t, 1), alone);
        EXPECT_TRUE(same_bits(one.o, got.o.rows(i, t, 1)) && same_bits(one.lse, got.lse.rows(i, t, 1))) << "sequence " << i << " step " << t;
      }
      EXPECT_TRUE(same_bits(carried_keys(alone, 1536), batch_row(keys, i))) << i;
      EXPECT_EQ(state.length(i), lengths[i] + steps);
    }
  }
}

TEST(DecodeRelations, K17_repeated_rows_have_the_same_bits) {
  Case c{.name = "", .tokens = 310, .query_heads = 4, .key_heads = 2, .key_width = 32, .value_width = 32, .gate = Gate::kMild};
  const Inputs one = make_inputs(c);
  const State alone(one, 512);
  prefill(one.tokens(0, 300), alone);
  const Outputs want = decode(one.tokens(300, 10), alone);
  for (const int64_t times : {4, 8}) {
    c.batch = times;
    Inputs many = make_inputs(c);
    for (const auto& [to, from] : {std::pair<Tensor*, const Tensor*>{&many.q, &one.q},
                                   {&many.k, &one.k},
                                   {&many.v, &one.v},
                                   {&many.w, &one.w},
                                   {&many.beta, &one.beta},
                                   {&many.g, &one.g}}) {
      to->fill([&](int64_t, int64_t t, int64_t h, int64_t i) { return from->at(0, t, h, i); });
    }
    const State state(many, 512);
    prefill(many.tokens(0, 300), state, 3);
    const Outputs got = decode(many.tokens(300, 10), state, 3);
    for (int64_t b = 0; b < times; ++b) EXPECT_TRUE(same_bits(batch_row(got.o, b), want.o) && same_bits(batch_row(got.lse, b), want.lse)) << b;
  }
}

TEST(DecodeRelations, any_number_of_workers_gives_the_same_bits) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Case c = small_case(1560);
    c.batch = 2, c.query_heads = 4, c.key_heads = 2, c.dtype = dtype;
    const Inputs in = with_faint_gates(c);
    const auto run = [&](int num_workers, Workers::Order order) {
      const State state(in, 2048);
      const Outputs prompt = prefill(in.tokens(0, 1530), state, num_workers);
      const Outputs got = decode(in.tokens(1530, 30), state, num_workers, order);
      return std::tuple(prompt.o, got.o, got.lse, carried_keys(state, 2048, num_workers), state.bytes());
    };
    const auto [prompt, o, lse, keys, bytes] = run(1, Workers::Order::kThreads);
    for (const int num_workers : {2, 7}) {
      for (const auto order : {Workers::Order::kThreads, Workers::Order::kReversed}) {
        const auto [other_prompt, other_o, other_lse, other_keys, other_bytes] = run(num_workers, order);
        EXPECT_TRUE(same_bits(prompt, other_prompt) && same_bits(o, other_o) && same_bits(lse, other_lse) && same_bits(keys, other_keys));
        EXPECT_TRUE(bytes == other_bytes);
      }
    }
  }
}

TEST(DecodeRelations, F07_strided_inputs) {
  for (const Layout layout : {Layout::kHeadsFirst, Layout::kFused}) {
    Case c{.name = "", .batch = 2, .tokens = 8, .query_heads = 4, .key_heads = 2, .key_width = 20, .value_width = 12, .gate = Gate::kMild};
    const Inputs contiguous = make_inputs(c);
    c.layout = layout;
    const Inputs strided = make_inputs(c);
    const State a(contiguous, 512), b(strided, 512);
    const Outputs first = decode(contiguous, a), second = decode(strided, b);
    EXPECT_TRUE(same_bits(first.o, second.o) && same_bits(first.lse, second.lse));
    EXPECT_TRUE(a.bytes() == b.bytes());
    const State c_state(contiguous, 512), d(strided, 512);
    prefill(contiguous, c_state);
    prefill(strided, d);
    EXPECT_TRUE(c_state.bytes() == d.bytes());
  }
}

TEST(DecodeRelations, nothing_to_do) {
  const Inputs in = make_inputs(small_case(3));
  const State state(in, 512);
  const std::vector<std::byte> before = state.bytes();
  ForwardArguments a = forward_arguments(in, {});
  a.problem.tokens = 0;
  EXPECT_TRUE(cpu::decode(a, state.view(), nullptr, Workers(1).executor()).ok());
  EXPECT_TRUE(state.bytes() == before);
  a.problem.batch = 0;
  DecodingState none = state.view();
  none.sequences = 0;
  EXPECT_TRUE(cpu::decode(a, none, nullptr, Workers(1).executor()).ok());
}

TEST(DecodeRelations, a_nan_stays_a_nan) {
  Inputs in = make_inputs(small_case(20));
  in.k.set(0, 4, 0, 3, std::numeric_limits<double>::quiet_NaN());
  const State state(in, 512);
  const Tensor o = decode(in, state).o;
  for (int64_t t = 0; t < 20; ++t) EXPECT_EQ(std::isnan(o.at(0, t, 0, 0)), t >= 4) << t;
}

}  // namespace
}  // namespace pathattn::test
