// The groups of the word problems, as tables. Element 0 is the identity.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pathattn {

class FiniteGroup {
 public:
  // "a5": the 60 even permutations of five places; "s5": all 120; "z60": the numbers 0 ... 59 added modulo 60. Permutations are in lexicographic
  // order.
  explicit FiniteGroup(const std::string& name);  // Error lists the groups

  int64_t order() const { return order_; }
  // first · second; of permutations: `first` is applied first.
  int64_t product(int64_t first, int64_t second) const { return products_[static_cast<size_t>(first * order_ + second)]; }

 private:
  int64_t order_;
  std::vector<int64_t> products_;
};

const std::vector<std::string>& finite_group_names();

}  // namespace pathattn
