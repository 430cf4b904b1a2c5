// What a case's outputs must meet, on any backend.
#pragma once

#include <gtest/gtest.h>

#include <ostream>

#include "kernels/tests/cases.h"

namespace pathattn::test {

inline void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

inline void expect_near(const char* name, const Tensor& got, const Tensor& want, double bound) {
  ASSERT_EQ(got.empty(), want.empty()) << name;
  if (got.empty()) return;
  // Gradients of a document's only token vanish; what a format leaves of them is compared with the inputs' size, 1.
  if (largest(want) < 1e-12) {
    EXPECT_LE(largest(got), got.dtype() == DType::kFloat64 ? 1e-13 : 1e-5) << name;
  } else {
    EXPECT_LE(relative_error(got, want), bound) << name << ", largest difference " << largest_difference(got, want);
  }
}

inline void expect_forward(const Outputs& got, const Outputs& want, const Tolerance& bound) {
  expect_near("o", got.o, want.o, bound.o);
  EXPECT_LE(largest_difference(got.lse, want.lse), bound.lse * (1 + largest(want.lse))) << "lse";
}

inline void expect_gradients(const Outputs& got, const Outputs& want, const Tolerance& bound) {
  expect_near("dq", got.dq, want.dq, bound.dqkv);
  expect_near("dk", got.dk, want.dk, bound.dqkv);
  expect_near("dv", got.dv, want.dv, bound.dqkv);
  expect_near("dw", got.dw, want.dw, bound.dw);
  expect_near("dbeta", got.dbeta, want.dbeta, bound.dbeta_dg);
  expect_near("dg", got.dg, want.dg, bound.dbeta_dg);
}

inline bool same_bits(const Outputs& x, const Outputs& y) {
  return same_bits(x.o, y.o) && same_bits(x.lse, y.lse) && same_bits(x.dq, y.dq) && same_bits(x.dk, y.dk) && same_bits(x.dv, y.dv) &&
         same_bits(x.dw, y.dw) && same_bits(x.dbeta, y.dbeta) && same_bits(x.dg, y.dg);
}

}  // namespace pathattn::test
