// Element types of tensors and what each is computed in.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/problem.h"

namespace pathattn::cpu {

struct BFloat16 {
  uint16_t bits;
};

template <typename Stored>
using ComputeOf = std::conditional_t<std::is_same_v<Stored, double>, double, float>;

inline float to_compute(float x) { return x; }
inline double to_compute(double x) { return x; }
inline float to_compute(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline BFloat16 to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded)};
}

template <typename Stored>
Stored from_compute(ComputeOf<Stored> x) {
  if constexpr (std::is_same_v<Stored, BFloat16>) {
    return to_bfloat16(x);
  } else {
    return x;
  }
}

// Calls visit with a value of the type that stores `dtype`.
template <typename Visit>
void visit_stored_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(float());
    case DType::kBFloat16:
      return visit(BFloat16());
    case DType::kFloat64:
      return visit(double());
    case DType::kFloat16:  // refused by every check
      return;
  }
}

}  // namespace pathattn::cpu
