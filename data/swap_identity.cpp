#include "data/swap_identity.h"

#include <algorithm>
#include <numeric>

namespace pathattn {
namespace {

using Places = std::array<int64_t, kNumPlaces>;  // the element in each place

bool all_in_place(const Places& places) { return std::is_sorted(places.begin(), places.end()); }

// The swap that brings the first element out of place home.
size_t repair(const Places& places) {
  int64_t first = 0;
  while (places[first] == first) ++first;
  const int64_t found = std::find(places.begin(), places.end(), first) - places.begin();
  return std::find(kSwaps.begin(), kSwaps.end(), std::pair{first, found}) - kSwaps.begin();
}

}  // namespace

void SwapIdentity::write(Random random, std::span<int64_t> tokens, std::span<int64_t> targets) const {
  Places places;
  std::iota(places.begin(), places.end(), 0);
  tokens[0] = kBegin;
  targets[0] = kSame;
  for (size_t i = 1; i < tokens.size(); ++i) {
    const size_t draw = random.below(2 * kSwaps.size());
    const size_t swap = draw >= kSwaps.size() && !all_in_place(places) ? repair(places) : draw % kSwaps.size();
    std::swap(places[kSwaps[swap].first], places[kSwaps[swap].second]);
    tokens[i] = kFirstSwap + static_cast<int64_t>(swap);
    targets[i] = all_in_place(places) ? kSame : kMoved;
  }
}

}  // namespace pathattn
