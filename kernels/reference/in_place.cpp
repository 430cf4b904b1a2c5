#include "kernels/reference/in_place.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pathattn::reference {
namespace {

template <typename AnyView>
double* row(const AnyView& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<double*>(const_cast<void*>(x.data)) + b * x.batch_stride + t * x.token_stride + h * x.head_stride;
}

}  // namespace

InPlaceDecoder::InPlaceDecoder(const Problem& p) : key_heads_(p.key_heads), key_width_(p.key_width), heads_(p.batch * p.key_heads) {
  for (Head& head : heads_) head.gates.resize(p.query_heads / p.key_heads);
}

void InPlaceDecoder::append(const ForwardArguments& a, int64_t t) {
  for (size_t n = 0; n < heads_.size(); ++n) {
    Head& head = heads_[n];
    const int64_t b = static_cast<int64_t>(n) / key_heads_, h = static_cast<int64_t>(n) % key_heads_, group = static_cast<int64_t>(head.gates.size());
    if (a.w.data) {
      const double* w = row(a.w, b, t, h);
      const double beta = *row(a.beta, b, t, h);
      for (int64_t j = 0; j < length_; ++j) {
        double* key = head.keys.data() + j * key_width_;
        double dot = 0;
        for (int64_t c = 0; c < key_width_; ++c) dot += key[c] * w[c];
        for (int64_t c = 0; c < key_width_; ++c) key[c] -= beta * dot * w[c];
      }
    }
    const double *k = row(a.k, b, t, h), *v = row(a.v, b, t, h);
    head.keys.insert(head.keys.end(), k, k + key_width_);
    head.values.insert(head.values.end(), v, v + a.problem.value_width);
    for (int64_t i = 0; i < group; ++i) {
      for (double& sum : head.gates[i]) sum += a.g.data ? *row(a.g, b, t, h * group + i) : 0;
      head.gates[i].push_back(0);
    }
  }
  ++length_;
}

void InPlaceDecoder::attend(const ForwardArguments& a, int64_t t) const {
  const Problem& p = a.problem;
  std::vector<double> scores(length_);
  for (size_t n = 0; n < heads_.size(); ++n) {
    const Head& head = heads_[n];
    const int64_t b = static_cast<int64_t>(n) / key_heads_, h = static_cast<int64_t>(n) % key_heads_, group = static_cast<int64_t>(head.gates.size());
    for (int64_t i = 0; i < group; ++i) {
      const double* q = row(a.q, b, t, h * group + i);
      for (int64_t j = 0; j < length_; ++j) {
        double dot = 0;
        for (int64_t c = 0; c < key_width_; ++c) dot += q[c] * head.keys[j * key_width_ + c];
        const double gates = head.gates[i][j];
        scores[j] = std::isinf(gates) ? gates : p.scale * dot + (p.gate_scaled ? p.scale * gates : gates);
      }
      const double highest = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double& s : scores) sum += s = std::exp(s - highest);
      double* o = row(a.o, b, t, h * group + i);
      std::fill_n(o, p.value_width, 0.0);
      for (int64_t j = 0; j < length_; ++j) {
        for (int64_t c = 0; c < p.value_width; ++c) o[c] += scores[j] / sum * head.values[j * p.value_width + c];
      }
      *row(a.lse, b, t, h * group + i) = highest + std::log(sum);
    }
  }
}

}  // namespace pathattn::reference
