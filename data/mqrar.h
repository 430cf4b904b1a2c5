// Multi-query repeated associative recall, N back (MQRAR-N): appendix of "PaTH Attention: Position Encoding via Accumulating Householder
// Transformations" (arXiv 2505.16381), after Tan et al. 2024, "Stick-breaking Attention" (arXiv 2410.17980).
//
// A sequence of T tokens is T/2 pairs (key, value), both drawn uniformly, so that keys recur, each time with another value. The target at a key is
// the value that this key had N occurrences ago (N = 1: the last one before); a key that has occurred fewer than N times before has no target.
#pragma once

#include "base/recipe.h"
#include "data/synthetic_task.h"

namespace pathattn {

struct MqrarSettings {
  int64_t n_back = 1, num_keys = 32, num_values = 32;
};

// Tokens 0 ... num_keys - 1 are the keys, those above the values.
class Mqrar : public SyntheticTask {
 public:
  Mqrar(const MqrarSettings& settings, int64_t tokens) : SyntheticTask(tokens), settings_(settings) {}  // tokens: even
  static Mqrar read(Recipe& recipe, int64_t tokens);

  int64_t vocabulary_size() const override { return settings_.num_keys + settings_.num_values; }
  nlohmann::json identity() const override;

 private:
  void write(Random random, std::span<int64_t> tokens, std::span<int64_t> targets) const override;

  MqrarSettings settings_;
};

}  // namespace pathattn
