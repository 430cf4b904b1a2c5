// What one PaTH layer can track with explicit weights, after theorems 2.1 and A.1 of arXiv 2505.16381; plain attention cannot.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <numeric>

#include "kernels/tests/cases.h"

namespace pathattn::test {
namespace {

constexpr double kSharp = 60;  // a matching key's logit; others have 0

int64_t argmax(const Tensor& o, int64_t t, int64_t head) {
  int64_t best = 0;
  for (int64_t c = 1; c < o.shape().width; ++c) {
    if (o.at(0, t, head, c) > o.at(0, t, head, best)) best = c;
  }
  return best;
}

// Five elements enter, then swaps of two places follow. Query head p asks after each swap which element is in place p.
TEST(Expressiveness, theorem_2_1_swaps_of_five_elements_are_tracked) {
  const int64_t places = 5, tokens = 1000;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Inputs in = make_inputs({.tokens = tokens, .query_heads = places, .key_width = places, .value_width = places, .dtype = dtype, .w = W::kZero});
    in.shape.scale = kSharp;
    in.q.fill([](int64_t, int64_t, int64_t head, int64_t c) { return head == c ? 1 : 0; });
    in.k.fill([](int64_t, int64_t t, int64_t, int64_t c) { return t == c ? 1 : 0; });  // an element's key is its place, a swap's is zero
    in.v.fill([](int64_t, int64_t t, int64_t, int64_t c) { return t == c ? 1 : 0; });
    in.beta.fill([](auto...) { return 2; });
    std::array<int64_t, 5> element_in{};
    std::iota(element_in.begin(), element_in.end(), 0);
    std::vector<std::array<int64_t, 5>> states(tokens, element_in);
    for (int64_t t = places; t < tokens; ++t) {
      const int64_t a = t * 7 % places, b = (a + 1 + t * t % (places - 1)) % places;
      in.w.set(0, t, 0, a, std::sqrt(0.5));
      in.w.set(0, t, 0, b, -std::sqrt(0.5));
      std::swap(element_in[a], element_in[b]);
      states[t] = element_in;
    }
    const Outputs out = forward(cpu_backend(2), in);
    for (int64_t t = places; t < tokens; ++t) {
      for (int64_t place = 0; place < places; ++place) ASSERT_EQ(argmax(out.o, t, place), states[t][place]) << "token " << t << " place " << place;
    }
  }
}

// A write erases what older keys hold along e_1 (beta 1, w = e_1), so that a read along e_1 finds the last write alone.
TEST(Expressiveness, theorem_A_1_a_read_finds_the_last_write) {
  const int64_t tokens = 3000;
  Inputs in = make_inputs({.tokens = tokens, .key_width = 4, .value_width = 2, .w = W::kZero});
  in.shape.scale = kSharp;
  in.q.fill([](int64_t, int64_t, int64_t, int64_t c) { return c == 0 ? 1 : 0; });
  in.beta.fill([](auto...) { return 1; });
  std::vector<int64_t> last_bit(tokens);
  int64_t bit = 1;
  for (int64_t t = 0; t < tokens; ++t) {
    const bool writes = t == 0 || t * 2654435761 % 97 < 2;  // 98 of 100 tokens are noise with random bits
    const int64_t own_bit = (t * 40503 >> 3) & 1;
    if (writes) bit = own_bit;
    last_bit[t] = bit;
    for (int64_t c = 0; c < 4; ++c) in.k.set(0, t, 0, c, c == 0 && writes ? 1 : 0);
    for (int64_t c = 0; c < 2; ++c) in.v.set(0, t, 0, c, c == own_bit ? 1 : 0);
    in.w.set(0, t, 0, 0, writes ? 1 : 0);
  }
  const Outputs out = forward(cpu_backend(2), in);
  for (int64_t t = 0; t < tokens; ++t) ASSERT_EQ(argmax(out.o, t, 0), last_bit[t]) << "token " << t;
}

}  // namespace
}  // namespace pathattn::test
