// Key by key: x_i = H_i ... H_{j+1} k_j, the key j as step i has rewritten it, is followed through all later steps. A row's scores are its
// products with q; the gradients are this recurrence run backwards.
#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/documents.h"

namespace pathattn::reference {
namespace {

// Lower triangle of a length x length matrix, row after row.
class Triangle {
 public:
  explicit Triangle(int64_t length) : values_(length * (length + 1) / 2) {}
  double* operator[](int64_t i) { return values_.data() + i * (i + 1) / 2; }

 private:
  std::vector<double> values_;
};

// x_i for i = j ... length - 1, row i - j of [length, K].
template <typename Arguments>
void follow_key(const Arguments& a, const Document& d, int64_t j, std::vector<double>& path) {
  const int64_t width = a.problem.key_width;
  std::copy_n(row(a.k, d.b, d.first + j, d.key_head), width, path.data());
  for (int64_t i = j + 1; i < d.length; ++i) {
    const double* before = path.data() + (i - 1 - j) * width;
    double* x = path.data() + (i - j) * width;
    std::copy_n(before, width, x);
    if (!a.w.data) continue;
    const double* w = row(a.w, d.b, d.first + i, d.key_head);
    add_multiple(-*row(a.beta, d.b, d.first + i, d.key_head) * dot(before, w, width), w, x, width);
  }
}

// softmax(s) of the document's rows for each query head of the group, and lse [group][length].
template <typename Arguments>
std::vector<Triangle> weights(const Arguments& a, const Document& d, std::vector<double>& lse) {
  const Problem& p = a.problem;
  const int64_t group = p.query_heads / p.key_heads;
  std::vector<Triangle> scores(group, Triangle(d.length));
  std::vector<double> path(d.length * p.key_width);
  for (int64_t j = 0; j < d.length; ++j) {
    follow_key(a, d, j, path);
    for (int64_t a_head = 0; a_head < group; ++a_head) {
      const int64_t head = d.key_head * group + a_head;
      double gates = 0;
      for (int64_t i = j; i < d.length; ++i) {
        if (a.g.data && i > j) gates += *row(a.g, d.b, d.first + i, head);
        const double logit = p.scale * dot(row(a.q, d.b, d.first + i, head), path.data() + (i - j) * p.key_width, p.key_width);
        // A gate of -inf cuts whatever scale is.
        scores[a_head][i][j] = std::isinf(gates) ? -std::numeric_limits<double>::infinity() : logit + (p.gate_scaled ? p.scale * gates : gates);
      }
    }
  }
  lse.resize(group * d.length);
  for (int64_t a_head = 0; a_head < group; ++a_head) {
    for (int64_t i = 0; i < d.length; ++i) {
      double* s = scores[a_head][i];
      const double highest = *std::max_element(s, s + i + 1);
      double sum = 0;
      for (int64_t j = 0; j <= i; ++j) sum += s[j] = std::exp(s[j] - highest);
      for (int64_t j = 0; j <= i; ++j) s[j] /= sum;
      lse[a_head * d.length + i] = highest + std::log(sum);
    }
  }
  return scores;
}

void forward(const ForwardArguments& a, const Document& d) {
  const Problem& p = a.problem;
  const int64_t group = p.query_heads / p.key_heads;
  std::vector<double> lse;
  std::vector<Triangle> probabilities = weights(a, d, lse);
  for (int64_t a_head = 0; a_head < group; ++a_head) {
    const int64_t head = d.key_head * group + a_head;
    for (int64_t i = 0; i < d.length; ++i) {
      double* o = row(a.o, d.b, d.first + i, head);
      std::fill_n(o, p.value_width, 0.0);
      for (int64_t j = 0; j <= i; ++j) add_multiple(probabilities[a_head][i][j], row(a.v, d.b, d.first + j, d.key_head), o, p.value_width);
      *row(a.lse, d.b, d.first + i, head) = lse[a_head * d.length + i];
    }
  }
}

// dS = P * (dO V^T - delta + d_lse) in place of P; adds P^T dO to dv.
void softmax_backward(const BackwardArguments& a, const Document& d, std::vector<Triangle>& probabilities) {
  const Problem& p = a.problem;
  std::vector<double> d_weights(d.length);
  const int64_t group = p.query_heads / p.key_heads;
  for (int64_t a_head = 0; a_head < group; ++a_head) {
    const int64_t head = d.key_head * group + a_head;
    for (int64_t i = 0; i < d.length; ++i) {
      const double* d_o = row(a.d_o, d.b, d.first + i, head);
      double* s = probabilities[a_head][i];
      double delta = 0;
      for (int64_t j = 0; j <= i; ++j) {
        d_weights[j] = dot(d_o, row(a.v, d.b, d.first + j, d.key_head), p.value_width);
        delta += s[j] * d_weights[j];
        add_multiple(s[j], d_o, row(a.dv, d.b, d.first + j, d.key_head), p.value_width);
      }
      const double d_lse = a.d_lse.data ? *row(a.d_lse, d.b, d.first + i, head) : 0;
      for (int64_t j = 0; j <= i; ++j) s[j] *= d_weights[j] - delta + d_lse;
    }
  }
}

void backward(const BackwardArguments& a, const Document& d) {
  const Problem& p = a.problem;
  const int64_t group = p.query_heads / p.key_heads, width = p.key_width;
  std::vector<double> lse;
  std::vector<Triangle> d_scores = weights(a, d, lse);
  softmax_backward(a, d, d_scores);
  std::vector<double> path(d.length * width), dx(width), gate_sums(group);
  for (int64_t j = 0; j < d.length; ++j) {
    follow_key(a, d, j, path);
    std::fill(dx.begin(), dx.end(), 0.0);
    std::fill(gate_sums.begin(), gate_sums.end(), 0.0);
    for (int64_t i = d.length - 1; i >= j; --i) {
      const int64_t t = d.first + i;
      for (int64_t a_head = 0; a_head < group; ++a_head) {
        const int64_t head = d.key_head * group + a_head;
        const double ds = d_scores[a_head][i][j];
        add_multiple(p.scale * ds, row(a.q, d.b, t, head), dx.data(), width);
        add_multiple(p.scale * ds, path.data() + (i - j) * width, row(a.dq, d.b, t, head), width);
        if (!a.g.data || i == j) continue;
        gate_sums[a_head] += ds;  // g_t is part of s_ij for every row at or after t
        *row(a.dg, d.b, t, head) += (p.gate_scaled ? p.scale : 1) * gate_sums[a_head];
      }
      if (!a.w.data || i == j) continue;
      const double* before = path.data() + (i - 1 - j) * width;
      const double* w = row(a.w, d.b, t, d.key_head);
      const double beta = *row(a.beta, d.b, t, d.key_head);
      const double x_w = dot(before, w, width), dx_w = dot(dx.data(), w, width);
      *row(a.dbeta, d.b, t, d.key_head) -= x_w * dx_w;
      add_multiple(-beta * x_w, dx.data(), row(a.dw, d.b, t, d.key_head), width);
      add_multiple(-beta * dx_w, before, row(a.dw, d.b, t, d.key_head), width);
      add_multiple(-beta * dx_w, w, dx.data(), width);
    }
    add_multiple(1, dx.data(), row(a.dk, d.b, d.first + j, d.key_head), width);
  }
}

void clear(const View& x, const Problem& p, int64_t heads, int64_t width) {
  if (!x.data) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) std::fill_n(row(x, b, t, h), width, 0.0);
    }
  }
}

}  // namespace

Status forward(const ForwardArguments& a) {
  if (const Status status = check(a); !status.ok()) return status;
  if (a.problem.dtype != DType::kFloat64) return {"the reference takes float64", static_cast<int64_t>(a.problem.dtype)};
  for_each_document(a.problem, [&](const Document& d) { forward(a, d); });
  return {};
}

Status backward(const BackwardArguments& a) {
  const Problem& p = a.problem;
  if (const Status status = check(a); !status.ok()) return status;
  if (p.dtype != DType::kFloat64) return {"the reference takes float64", static_cast<int64_t>(p.dtype)};
  clear(a.dq, p, p.query_heads, p.key_width);
  clear(a.dk, p, p.key_heads, p.key_width);
  clear(a.dv, p, p.key_heads, p.value_width);
  clear(a.dw, p, p.key_heads, p.key_width);
  clear(a.dbeta, p, p.key_heads, 1);
  clear(a.dg, p, p.query_heads, 1);
  for_each_document(p, [&](const Document& d) { backward(a, d); });
  return {};
}

}  // namespace pathattn::reference
