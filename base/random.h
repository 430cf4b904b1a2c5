// Counter-based random numbers: the n-th draw of a stream is a function of (seed, stream, n) alone, so a position is all there is to save.
#pragma once

#include <cstdint>

namespace pathattn {

class Random {
 public:
  Random(uint64_t seed, uint64_t stream, uint64_t position = 0);
  uint64_t next();                 // 64 random bits
  uint64_t below(uint64_t bound);  // uniform in [0, bound), unbiased; bound >= 1; uses one draw, rarely more
  double uniform();                // uniform in [0, 1), 53 bits

 private:
  uint64_t first_key_, second_key_, position_;
};

}  // namespace pathattn
