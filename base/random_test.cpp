#include "base/random.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <set>

#include "base/error.h"

namespace pathattn {
namespace {

TEST(Random, draw_is_a_function_of_seed_stream_and_position) {
  Random whole(7, 3);
  std::vector<uint64_t> draws;
  for (int i = 0; i < 100; ++i) draws.push_back(whole.next());
  Random resumed(7, 3, 40);
  for (int i = 40; i < 100; ++i) EXPECT_EQ(resumed.next(), draws[i]);
}

// Recorded once: a change would silently reorder the data of every saved run.
TEST(Random, draws_never_change) {
  Random random(1, 2);
  EXPECT_EQ(random.next(), 3681383648426147041u);
  EXPECT_EQ(random.next(), 9686681243540154354u);
}

TEST(Random, seeds_and_streams_differ) {
  std::set<uint64_t> seen;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    for (uint64_t stream = 0; stream < 30; ++stream) {
      Random random(seed, stream);
      for (int i = 0; i < 30; ++i) seen.insert(random.next());
    }
  }
  EXPECT_EQ(seen.size(), 27'000u);
}

TEST(Random, bits_are_even_and_neighbours_independent) {
  std::array<int64_t, 64> ones{};
  int64_t flips_by_position = 0, flips_by_seed = 0;
  constexpr int64_t kDraws = 100'000;
  Random random(5, 0);
  uint64_t previous = random.next();
  for (int64_t i = 1; i <= kDraws; ++i) {
    const uint64_t draw = random.next();
    for (int bit = 0; bit < 64; ++bit) ones[bit] += draw >> bit & 1;
    flips_by_position += std::popcount(draw ^ previous);
    flips_by_seed += std::popcount(draw ^ Random(5 + (uint64_t{1} << i % 64), 0, i).next());
    previous = draw;
  }
  for (const int64_t count : ones) EXPECT_NEAR(count, kDraws / 2, 5 * std::sqrt(kDraws / 4.0));
  EXPECT_NEAR(flips_by_position, 32 * kDraws, 5 * std::sqrt(16.0 * kDraws));
  EXPECT_NEAR(flips_by_seed, 32 * kDraws, 5 * std::sqrt(16.0 * kDraws));
}

TEST(Random, below_is_uniform_for_any_bound) {
  Random random(11, 0);
  std::array<int64_t, 7> counts{};
  for (int i = 0; i < 70'000; ++i) ++counts.at(random.below(7));
  for (const int64_t count : counts) EXPECT_NEAR(count, 10'000, 500);
  EXPECT_EQ(random.below(1), 0u);
  const uint64_t large = (uint64_t{1} << 63) + 1;  // rejects almost half of the draws
  for (int i = 0; i < 1000; ++i) EXPECT_LT(random.below(large), large);
  EXPECT_THROW(random.below(0), Error);
}

TEST(Random, uniform_is_in_the_unit_interval) {
  Random random(13, 0);
  double sum = 0;
  for (int i = 0; i < 100'000; ++i) {
    const double draw = random.uniform();
    ASSERT_GE(draw, 0.0);
    ASSERT_LT(draw, 1.0);
    sum += draw;
  }
  EXPECT_NEAR(sum / 100'000, 0.5, 0.005);
}

}  // namespace
}  // namespace pathattn
