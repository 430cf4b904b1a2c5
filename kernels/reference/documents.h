// Rows of float64 tensors and the documents they belong to, as the references read them.
#pragma once

#include "kernels/problem.h"

namespace pathattn::reference {

inline const double* row(const ConstView& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<const double*>(x.data) + b * x.batch_stride + t * x.token_stride + h * x.head_stride;
}
inline double* row(const View& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<double*>(x.data) + b * x.batch_stride + t * x.token_stride + h * x.head_stride;
}

inline double dot(const double* x, const double* y, int64_t n) {
  double sums[4] = {};  // four chains, so that additions do not wait for one another
  int64_t c = 0;
  for (; c + 4 <= n; c += 4) {
    for (int l = 0; l < 4; ++l) sums[l] += x[c + l] * y[c + l];
  }
  for (; c < n; ++c) sums[0] += x[c] * y[c];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

inline void add_multiple(double factor, const double* x, double* y, int64_t n) {
  for (int64_t c = 0; c < n; ++c) y[c] += factor * x[c];
}

// One document under one key head: rows first ... first + length - 1 of batch row b.
struct Document {
  int64_t b, first, length, key_head;
};

template <typename Visit>
void for_each_document(const Problem& p, Visit&& visit) {
  const int64_t num_documents = p.cu_seqlens ? p.num_documents : p.batch;
  for (int64_t n = 0; n < num_documents; ++n) {
    for (int64_t h = 0; h < p.key_heads; ++h) {
      if (p.cu_seqlens) {
        visit(Document{0, p.cu_seqlens[n], p.cu_seqlens[n + 1] - p.cu_seqlens[n], h});
      } else {
        visit(Document{n, 0, p.tokens, h});
      }
    }
  }
}

}  // namespace pathattn::reference
