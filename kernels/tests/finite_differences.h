// A backend's gradients against finite differences of its own forward.
#pragma once

#include <gtest/gtest.h>

#include "kernels/tests/backend.h"

namespace pathattn::test {

// What the gradients are of: sum of o * d_o, and of lse * d_lse where there is one.
inline double objective(const Backend& backend, const Inputs& in) {
  const Outputs out = forward(backend, in);
  double sum = 0;
  for (int64_t b = 0; b < in.shape.batch; ++b) {
    for (int64_t t = 0; t < in.shape.tokens; ++t) {
      for (int64_t head = 0; head < in.shape.query_heads; ++head) {
        for (int64_t c = 0; c < in.shape.value_width; ++c) sum += out.o.at(b, t, head, c) * in.d_o.at(b, t, head, c);
        if (!in.d_lse.empty()) sum += out.lse.at(b, t, head) * in.d_lse.at(b, t, head);
      }
    }
  }
  return sum;
}

// Fourth-order central differences for every single element.
inline void expect_derivative(const Backend& backend, const Inputs& in, Tensor Inputs::*input, const Tensor& gradient) {
  const Shape& s = gradient.shape();
  const double step = 1e-3;
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t h = 0; h < s.heads; ++h) {
        for (int64_t c = 0; c < s.width; ++c) {
          const auto at = [&](double change) {
            Inputs moved = in;
            moved.*input = (in.*input).to(DType::kFloat64);
            (moved.*input).set(b, t, h, c, (in.*input).at(b, t, h, c) + change);
            return objective(backend, moved);
          };
          const double slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step);
          EXPECT_NEAR(gradient.at(b, t, h, c), slope, 1e-9) << b << ' ' << t << ' ' << h << ' ' << c;
        }
      }
    }
  }
}

}  // namespace pathattn::test
