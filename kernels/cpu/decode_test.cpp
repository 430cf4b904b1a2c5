// Prefill, decode and the keys that a decoding state stands for, against a whole forward and against the in-place rule, both in float64.
// decode_relations_test.cpp has the rest.
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
  const Inputs in = with_faint_gates(small_case(1100));
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
      Case c = small_case(2700);
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
          Case c = small_case(560);
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
  Inputs in = with_faint_gates(small_case(1100));
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

TEST(Decode, a_sequence_can_be_filled_to_the_last_token_of_its_capacity) {
  const Inputs in = with_faint_gates(small_case(1025));
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

}  // namespace
}  // namespace pathattn::test
