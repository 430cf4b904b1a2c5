// Counter-based random numbers: the n-th draw of a stream is a function of (seed, stream, n) alone, so a position is all there is to save.
#pragma once

#include <cstdint>

namespace pathattn {

class Random {
 public:
  Random(uint64_t seed, uint64_t stream, uint64_t position = 0) : seed_(seed), stream_(stream), position_(position) {}
  uint64_t next();                       // 64 random bits
  uint64_t below(uint64_t bound);        // uniform in [0, bound), unbiased
  double uniform();                      // uniform in [0, 1), 53 bits
  uint64_t position() const { return position_; }

 private:
  uint64_t seed_, stream_, position_;
};

}  // namespace pathattn
