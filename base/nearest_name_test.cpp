#include "base/nearest_name.h"

#include <gtest/gtest.h>

namespace pathattn {
namespace {

TEST(NearestName, needs_the_fewest_letters_changed) {
  const std::vector<std::string> names = {"seed", "output", "top-k", "top-p", "prompt"};
  EXPECT_EQ(nearest_name("outptu", names), "output");
  EXPECT_EQ(nearest_name("sed", names), "seed");
  EXPECT_EQ(nearest_name("seeds", names), "seed");
  EXPECT_EQ(nearest_name("topp", names), "top-p");
  EXPECT_EQ(nearest_name("output", names), "output");
}

TEST(NearestName, is_none_if_more_than_a_third_differ) {
  EXPECT_EQ(nearest_name("abcdef", {"abcdxy"}), "abcdxy");
  EXPECT_EQ(nearest_name("abcdef", {"abcxyz"}), std::nullopt);
  EXPECT_EQ(nearest_name("prompt-file", {"prompt"}), std::nullopt);
  EXPECT_EQ(nearest_name("ab", {"a"}), std::nullopt);
  EXPECT_EQ(nearest_name("", {"a"}), std::nullopt);
  EXPECT_EQ(nearest_name("seed", {}), std::nullopt);
}

}  // namespace
}  // namespace pathattn
