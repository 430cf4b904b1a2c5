#include "data/finite_group.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "base/error.h"

namespace pathattn {
namespace {

constexpr int64_t kCyclicOrder = 60;

using Permutation = std::array<size_t, 5>;  // place i goes to place p[i]

bool is_even(const Permutation& permutation) {
  int64_t inversions = 0;
  for (size_t i = 0; i < permutation.size(); ++i) {
    for (size_t j = i + 1; j < permutation.size(); ++j) inversions += permutation[i] > permutation[j];
  }
  return inversions % 2 == 0;
}

std::vector<Permutation> permutations(bool only_even) {
  std::vector<Permutation> all;
  Permutation permutation;
  std::iota(permutation.begin(), permutation.end(), 0);
  do {
    if (!only_even || is_even(permutation)) all.push_back(permutation);
  } while (std::next_permutation(permutation.begin(), permutation.end()));
  return all;
}

}  // namespace

FiniteGroup::FiniteGroup(const std::string& name) {
  if (name == "z60") {
    order_ = kCyclicOrder;
    for (int64_t first = 0; first < order_; ++first) {
      for (int64_t second = 0; second < order_; ++second) products_.push_back((first + second) % order_);
    }
    return;
  }
  if (name != "a5" && name != "s5") fail("\"{}\" is no group of the word problems, there are a5, s5 and z60", name);
  const std::vector<Permutation> elements = permutations(/*only_even=*/name == "a5");
  order_ = static_cast<int64_t>(elements.size());
  for (const Permutation& first : elements) {
    for (const Permutation& second : elements) {
      Permutation product;
      for (size_t i = 0; i < product.size(); ++i) product[i] = second[first[i]];
      products_.push_back(std::lower_bound(elements.begin(), elements.end(), product) - elements.begin());
    }
  }
}

const std::vector<std::string>& finite_group_names() {
  static const std::vector<std::string> names = {"a5", "s5", "z60"};
  return names;
}

}  // namespace pathattn
