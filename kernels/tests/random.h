// The same random numbers on every machine and with every standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace pathattn::test {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  double uniform() {  // in (0, 1); splitmix64 (Steele, Lea and Flood, 2014)
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (static_cast<double>((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
  }
  double uniform(double from, double to) { return from + (to - from) * uniform(); }
  double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(2 * std::numbers::pi * uniform()); }

 private:
  uint64_t state_;
};

}  // namespace pathattn::test
