// Is a product of swaps of five elements the identity? The problem of theorem 2.1 of "PaTH Attention: Position Encoding via Accumulating Householder
// Transformations" (arXiv 2505.16381).
//
// A sequence begins with kBegin; each token after it swaps what lies in two of five places. The target at every position is whether all elements are
// then where they were: kSame or kMoved. One half of the swaps is uniform; the other half puts the first element out of place there, so that the
// identity recurs.
#pragma once

#include <array>
#include <utility>

#include "base/recipe.h"
#include "data/synthetic_task.h"

namespace pathattn {

constexpr int64_t kNumPlaces = 5;
constexpr std::array<std::pair<int64_t, int64_t>, 10> kSwaps = {{{0, 1}, {0, 2}, {0, 3}, {0, 4}, {1, 2}, {1, 3}, {1, 4}, {2, 3}, {2, 4}, {3, 4}}};

enum SwapToken : int64_t { kBegin = 0, kFirstSwap = 1, kMoved = 11, kSame = 12 };  // kFirstSwap + i: kSwaps[i]
constexpr int64_t kNumSwapTokens = 13;

class SwapIdentity : public SyntheticTask {
 public:
  explicit SwapIdentity(int64_t tokens) : SyntheticTask(tokens) {}

  int64_t vocabulary_size() const override { return kNumSwapTokens; }
  nlohmann::json identity() const override { return {{"kind", "swap_identity"}}; }

 private:
  void write(Random random, std::span<int64_t> tokens, std::span<int64_t> targets) const override;
};

}  // namespace pathattn
