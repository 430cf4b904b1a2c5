#include "base/random.h"

#include "base/error.h"

namespace pathattn {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio, odd

// A bijection of 64 bits in which every output bit depends on every input bit: David Stafford's variant 13 of MurmurHash3's finaliser.
uint64_t mix(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits ^ (bits >> 31);
}

}  // namespace

Random::Random(uint64_t seed, uint64_t stream, uint64_t position) : position_(position) {
  const uint64_t key = mix(mix(seed + kGolden) ^ (stream * kGolden));
  first_key_ = mix(key + kGolden);
  second_key_ = mix(key + 2 * kGolden);
}

// Two keyed rounds: with one, all streams would be shifts of a single sequence.
uint64_t Random::next() { return mix(mix(position_++ * kGolden + first_key_) ^ second_key_); }

uint64_t Random::below(uint64_t bound) {
  if (bound == 0) fail("a random number below 0 was asked for; the bound must be at least 1");
  // The high half of draw * bound is uniform once the low halves under 2^64 mod bound are rejected.
  const uint64_t rejected = -bound % bound;
  while (true) {
    const auto product = static_cast<unsigned __int128>(next()) * bound;
    if (static_cast<uint64_t>(product) >= rejected) return static_cast<uint64_t>(product >> 64);
  }
}

double Random::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

}  // namespace pathattn
