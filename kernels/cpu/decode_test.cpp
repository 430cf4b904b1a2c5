// Prefill, decode and the keys that a decoding state stands for, against a whole forward and against the in-place rule, both in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/in_place.h"
#include "kernels/tests/cases.h"
#include "kernels/tests/decoding.h"

namespace pathattn::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double bound(DType dtype) { return dtype == DType::kFloat64 ? 1e-14 : dtype == DType::kFloat32 ? 2e-6 : 3e-3; }

Tensor rows(const Tensor& x, int64_t first, int64_t count) {
  Tensor part(x.dtype(), {x.shape().batch, count, x.shape().heads, x.shape().width});
  part.fill([&](int64_t b, int64_t t, int64_t h, int64_t c) { return x.at(b, first + t, h, c); });
  return part;
}

Tensor batch_row(const Tensor& x, int64_t b) { return x.rows(b, 0, x.shape().tokens); }

// The keys of the first `count` tokens, by the in-place rule.
Tensor expected_keys(const Inputs& in, int64_t count) {
  const Inputs exact = in.to(DType::kFloat64);
  reference::InPlaceDecoder decoder(exact.shape);
  for (int64_t t = 0; t < count; ++t) decoder.append(forward_arguments(exact, {}), t);
  Tensor keys(DType::kFloat64, {exact.shape.batch, count, exact.shape.key_heads, exact.shape.key_width});
  keys.fill([&](int64_t b, int64_t j, int64_t h, int64_t c) { return decoder.key(b, h, j)[c]; });
  return keys;
}

int64_t capacity_for(int64_t tokens) { return (tokens + kDecodeChunk - 1) / kDecodeChunk * kDecodeChunk; }

// Prefills `first` tokens, decodes the others `at_once` at a time, and compares with rows of the whole forward `want`.
void expect_split(const Inputs& in, const Outputs& want, int64_t first, int64_t steps, int64_t at_once = 1) {
  SCOPED_TRACE("prefill " + std::to_string(first) + ", then " + std::to_string(steps) + " by " + std::to_string(at_once));
  const State state(in, capacity_for(first + steps));
  const double limit = bound(in.shape.dtype);
  if (first > 0) {
    const Inputs prompt = in.tokens(0, first);
    const Outputs by_prefill = prefill(prompt, state), by_forward = forward(cpu_backend(), prompt);
    EXPECT_TRUE(same_bits(by_prefill.o, by_forward.o) && same_bits(by_prefill.lse, by_forward.lse));
  }
  Tensor o(in.shape.dtype, {in.shape.batch, steps, in.shape.query_heads, in.shape.value_width});
  Tensor lse(want.lse.dtype(), {in.shape.batch, steps, in.shape.query_heads, 1});
  for (int64_t t = 0; t < steps; t += at_once) {
    const int64_t count = std::min(at_once, steps - t);
    const Outputs got = decode(in.tokens(first + t, count), state);
    for (int64_t i = 0; i < count; ++i) {
      const Tensor got_row = rows(got.o, i, 1), want_row = rows(want.o, first + t + i, 1);
      const double difference = largest_difference(got_row, want_row);
      ASSERT_LE(difference, 4 * limit * largest(want.o)) << "step " << t + i;
    }
    for (int64_t b = 0; b < in.shape.batch; ++b) {
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t h = 0; h < in.shape.query_heads; ++h) {
          for (int64_t c = 0; c < in.shape.value_width; ++c) o.set(b, t + i, h, c, got.o.at(b, i, h, c));
          lse.set(b, t + i, h, 0, got.lse.at(b, i, h));
        }
      }
    }
  }
  EXPECT_LE(relative_error(o, rows(want.o, first, steps)), limit);
  EXPECT_LE(relative_error(lse, rows(want.lse, first, steps)), limit);
}

Case small(int64_t tokens) {
  return {.name = "small", .batch = 1, .tokens = tokens, .query_heads = 2, .key_heads = 1, .key_width = 16, .value_width = 8, .gate = Gate::kMild};
}

// Gates so near 1 that tokens of the first pages still weigh something.
Inputs with_faint_gates(const Case& c) {
  Inputs in = make_inputs(c);
  in.g.fill([gates = in.g.to(in.g.dtype())](int64_t b, int64_t t, int64_t h, int64_t) { return 0.03 * gates.at(b, t, h); });
  return in;
}

TEST(Decode, G11_old_keys_are_rewritten_before_the_new_key_joins) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    Inputs in = make_inputs({.name = "", .tokens = 3, .key_width = 2, .value_width = 2, .dtype = dtype});
    in.shape.scale = 1;
    const double w[3][2] = {{1, 0}, {1, 0}, {0, 1}}, v[3][2] = {{1, 0}, {0, 1}, {0, 0}};
    in.k.fill([&](auto...) { return 1; });
    in.w.fill([&](int64_t, int64_t t, int64_t, int64_t c) { return w[t][c]; });
    in.v.fill([&](int64_t, int64_t t, int64_t, int64_t c) { return v[t][c]; });
    in.beta.fill([&](auto...) { return 2; });
    in.q.fill([&](int64_t, int64_t, int64_t, int64_t c) { return c == 0; });
    const State state(in, kDecodeChunk);
    prefill(in.tokens(0, 1), state);
    const Tensor weights = decode(in.tokens(1, 1), state).o;  // v is the identity
    EXPECT_NEAR(weights.at(0, 0, 0, 0), 0.1192029, dtype == DType::kBFloat16 ? 5e-4 : 1e-7);
    EXPECT_NEAR(weights.at(0, 0, 0, 1), 0.8807971, dtype == DType::kBFloat16 ? 2e-3 : 1e-7);
    const auto expect_keys = [&](std::initializer_list<std::pair<double, double>> want) {
      const Tensor keys = carried_keys(state, static_cast<int64_t>(want.size()));
      for (int64_t j = 0; const auto& [x, y] : want) {
        EXPECT_EQ(keys.at(0, j, 0, 0), x) << j;
        EXPECT_EQ(keys.at(0, j++, 0, 1), y);
      }
    };
    expect_keys({{-1, 1}, {1, 1}});
    decode(in.tokens(2, 1), state);
    expect_keys({{-1, -1}, {1, -1}, {1, 1}});
  }
}

class P13 : public testing::TestWithParam<std::tuple<int64_t, bool, DType>> {};

TEST_P(P13, decode_equals_forward_and_keys_the_in_place_rule) {
  const auto [width, gate, dtype] = GetParam();
  const Inputs in = make_inputs({.name = "",
                                 .tokens = 800,
                                 .query_heads = 4,
                                 .key_heads = 2,
                                 .key_width = width,
                                 .value_width = width,
                                 .dtype = dtype,
                                 .gate = gate ? Gate::kMild : Gate::kNone});
  const Outputs want = expected(in, /*with_gradients=*/false);
  for (const int64_t first : {1, 63, 64, 65, 127, 128, 129, 500}) {
    expect_split(in, want, first, 300);
    const State state(in, kDecodeChunk);
    prefill(in.tokens(0, first), state);
    EXPECT_LE(relative_error(carried_keys(state, first), expected_keys(in, first)), 2e-6) << first;
  }
}

INSTANTIATE_TEST_SUITE_P(Decode, P13,
                         testing::Combine(testing::Values(64, 128), testing::Bool(), testing::Values(DType::kFloat32, DType::kBFloat16)));

TEST(Decode, P23_bfloat16_does_not_drift_over_4096_steps) {
  const int64_t steps = 4096, prompt = 64;
  const Inputs in = make_inputs(
      {.name = "", .tokens = prompt + steps, .key_width = 128, .value_width = 128, .dtype = DType::kBFloat16, .beta_from = 2, .beta_to = 2});
  const Inputs exact = in.to(DType::kFloat64);
  Outputs want;
  want.o = Tensor(DType::kFloat64, {1, prompt + steps, 1, 128}), want.lse = Tensor(DType::kFloat64, {1, prompt + steps, 1, 1});
  const ForwardArguments arguments = forward_arguments(exact, want);
  reference::InPlaceDecoder oracle(exact.shape);
  const State state(in, capacity_for(prompt + steps));
  prefill(in.tokens(0, prompt), state);
  for (int64_t t = 0; t < prompt; ++t) oracle.append(arguments, t);
  for (int64_t step = 1; step <= steps; ++step) {
    const int64_t t = prompt + step - 1;
    oracle.append(arguments, t);
    const Tensor o = decode(in.tokens(t, 1), state).o;
    if (step != 512 && step != 1024 && step != 2048 && step != 4096) continue;
    oracle.attend(arguments, t);
    EXPECT_LE(relative_error(o, rows(want.o, t, 1)), 1e-2) << step;
    Tensor keys(DType::kFloat64, {1, t + 1, 1, 128});
    keys.fill([&](int64_t, int64_t j, int64_t, int64_t c) { return oracle.key(0, 0, j)[c]; });
    EXPECT_LE(relative_error(carried_keys(state, t + 1), keys), 1e-2) << step;
  }
}

TEST(Decode, any_split_near_a_chunk_boundary) {
  const Inputs in = with_faint_gates(small(1100));
  const Outputs want = expected(in, /*with_gradients=*/false);
  for (const int64_t boundary : {512, 1024}) {
    for (int64_t first = boundary - 6; first <= boundary + 4; ++first) {
      expect_split(in, want, first, 8);
      expect_split(in, want, first, 70, 10);
    }
  }
}

TEST(Decode, every_split_of_a_short_sequence) {
  const Inputs in =
      make_inputs({.name = "", .batch = 2, .tokens = 140, .query_heads = 4, .key_heads = 2, .key_width = 8, .value_width = 12, .gate = Gate::kMild});
  const Outputs want = expected(in, /*with_gradients=*/false);
  for (int64_t first = 0; first < 140; ++first) expect_split(in, want, first, 140 - first, 9);
}

TEST(Decode, many_chunks) {
  for (const W w : {W::kUnit, W::kNone}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
      Case c = small(2700);
      c.w = w;
      c.dtype = dtype;
      const Inputs in = with_faint_gates(c);
      const Outputs want = expected(in, /*with_gradients=*/false);
      expect_split(in, want, 2600, 100);
      expect_split(in, want, 0, 2700, 7);
      const State state(in, 3072);
      prefill(in.tokens(0, 2600), state);
      EXPECT_LE(relative_error(carried_keys(state, 2600), expected_keys(in, 2600)), bound(dtype));
      decode(in.tokens(2600, 100), state);
      EXPECT_LE(relative_error(carried_keys(state, 2700, 3), expected_keys(in, 2700)), bound(dtype));
    }
  }
}

TEST(Decode, widths_and_heads) {
  for (const auto& [k, v] : {std::pair<int64_t, int64_t>{1, 1}, {7, 33}, {33, 7}, {20, 40}, {256, 1}, {1, 256}, {72, 80}, {65, 63}}) {
    for (const auto& [hq, h] : {std::pair<int64_t, int64_t>{1, 1}, {6, 2}, {7, 1}}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
        const Inputs in = make_inputs(
            {.name = "", .tokens = 150, .query_heads = hq, .key_heads = h, .key_width = k, .value_width = v, .dtype = dtype, .gate = Gate::kMild});
        SCOPED_TRACE("K " + std::to_string(k) + " V " + std::to_string(v) + " HQ " + std::to_string(hq));
        expect_split(in, expected(in, /*with_gradients=*/false), 120, 30, 4);
      }
    }
  }
}

TEST(Decode, gates) {
  for (const Gate gate : {Gate::kZero, Gate::kAlternating, Gate::kStrong, Gate::kCut, Gate::kNearCut}) {
    for (const bool gate_scaled : {false, true}) {
      for (const W w : {W::kUnit, W::kNone}) {
        for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
          Case c = small(560);
          c.gate = gate;
          c.gate_scaled = gate_scaled;
          c.w = w;
          c.dtype = dtype;
          SCOPED_TRACE("gate " + std::to_string(static_cast<int>(gate)) + ", scaled " + std::to_string(gate_scaled));
          const Inputs in = make_inputs(c);
          const Outputs want = expected(in, /*with_gradients=*/false);
          expect_split(in, want, 90, 60);
          expect_split(in, want, 130, 430, 5);
        }
      }
    }
  }
}

TEST(Decode, a_gate_of_minus_infinity_hides_whole_pages) {
  Inputs in = with_faint_gates(small(1100));
  in.g.set(0, 1030, 0, 0, -kInfinity);
  in.g.set(0, 1031, 0, 0, -kInfinity);
  const Outputs want = expected(in, /*with_gradients=*/false);
  expect_split(in, want, 1028, 10);
  expect_split(in, want, 1040, 10);
}

TEST(Decode, P22_the_gate_is_added_after_the_scale) {
  Inputs in = make_inputs({.name = "", .tokens = 3, .value_width = 3, .gate = Gate::kZero});
  in.q.fill([](auto...) { return 0; });
  in.g.fill([](auto...) { return -0.5; });
  in.v.fill([](int64_t, int64_t t, int64_t, int64_t c) { return t == c; });
  const State state(in, kDecodeChunk);
  prefill(in.tokens(0, 2), state);
  const Tensor o = decode(in.tokens(2, 1), state).o;
  EXPECT_NEAR(o.at(0, 0, 0, 0), 0.1863237, 1e-6);
  EXPECT_NEAR(o.at(0, 0, 0, 1), 0.3071959, 1e-6);
  EXPECT_NEAR(o.at(0, 0, 0, 2), 0.5064804, 1e-6);
}

TEST(Decode, F17_several_tokens_are_the_same_as_one_by_one) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{4, 3}, {100, 5}, {64, 64}, {63, 2}, {505, 30}}) {
      Case c = small(first + count);
      c.dtype = dtype;
      const Inputs in = make_inputs(c);
      const State together(in, 1024), one_by_one(in, 1024);
      prefill(in.tokens(0, first), together);
      prefill(in.tokens(0, first), one_by_one);
      const Outputs all = decode(in.tokens(first, count), together);
      for (int64_t t = 0; t < count; ++t) {
        const Outputs one = decode(in.tokens(first + t, 1), one_by_one);
        EXPECT_TRUE(same_bits(one.o, rows(all.o, t, 1)) && same_bits(one.lse, rows(all.lse, t, 1))) << first << "+" << count << " at " << t;
      }
      EXPECT_EQ(together.bytes(), one_by_one.bytes()) << first << "+" << count;
    }
  }
}

TEST(Decode, F01_nothing_beyond_the_length_is_read) {
  for (const W w : {W::kUnit, W::kNone}) {
    Case c = small(700);
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

TEST(Decode, P17_a_refused_call_changes_nothing) {
  const Inputs in = make_inputs(small(520));
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

TEST(Decode, a_sequence_can_be_filled_to_the_last_token_of_its_capacity) {
  const Inputs in = with_faint_gates(small(1025));
  const Outputs want = expected(in, /*with_gradients=*/false);
  const State state(in, 1024);
  prefill(in.tokens(0, 1020), state);
  EXPECT_LE(relative_error(decode(in.tokens(1020, 4), state).o, rows(want.o, 1020, 4)), 1e-5);
  EXPECT_EQ(state.length(0), 1024);
  EXPECT_THROW(decode(in.tokens(1024, 1), state), std::runtime_error);
  EXPECT_LE(relative_error(carried_keys(state, 1024), expected_keys(in, 1024)), 1e-5);
  const State by_prefill(in, 1024);
  prefill(in.tokens(0, 1024), by_prefill);
  EXPECT_LE(relative_error(carried_keys(by_prefill, 1024), expected_keys(in, 1024)), 1e-5);
}

// Documents of these lengths in one prefill, then common steps: against each document alone, bit for bit.
TEST(Decode, F14_K17_a_sequence_does_not_see_its_neighbours) {
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

TEST(Decode, K17_repeated_rows_have_the_same_bits) {
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

TEST(Decode, any_number_of_workers_gives_the_same_bits) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Case c = small(1560);
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

TEST(Decode, F07_strided_inputs) {
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

TEST(Decode, nothing_to_do) {
  const Inputs in = make_inputs(small(3));
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

TEST(Decode, a_nan_stays_a_nan) {
  Inputs in = make_inputs(small(20));
  in.k.set(0, 4, 0, 3, std::numeric_limits<double>::quiet_NaN());
  const State state(in, 512);
  const Tensor o = decode(in, state).o;
  for (int64_t t = 0; t < 20; ++t) EXPECT_EQ(std::isnan(o.at(0, t, 0, 0)), t >= 4) << t;
}

}  // namespace
}  // namespace pathattn::test
