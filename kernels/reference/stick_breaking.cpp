#include "kernels/reference/stick_breaking.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/reference/documents.h"

namespace pathattn::reference {
namespace {

// One query's keys, oldest first: sigmoid(z_ij), 1 - sigmoid(z_ij) and A_ij for j < i, and what is left.
struct Stick {
  std::vector<double> taken, kept, weights;
  double rest;
};

template <typename Arguments>
Stick break_stick(const Arguments& a, const Document& d, int64_t i, int64_t head) {
  Stick stick{std::vector<double>(i), std::vector<double>(i), std::vector<double>(i), 1};
  const double* q = row(a.q, d.b, d.first + i, head);
  long double rest = 1;  // thousands of like factors would all round the same way
  for (int64_t j = i - 1; j >= 0; --j) {
    const double z = a.problem.scale * dot(q, row(a.k, d.b, d.first + j, d.key_head), a.problem.key_width);
    stick.taken[j] = 1 / (1 + std::exp(-z));
    stick.kept[j] = 1 / (1 + std::exp(z));  // 1 - taken without its cancellation
    stick.weights[j] = static_cast<double>(stick.taken[j] * rest);
    rest = z < 0 ? rest - stick.taken[j] * rest : stick.kept[j] * rest;
  }
  stick.rest = static_cast<double>(rest);
  return stick;
}

void forward(const StickBreakingForwardArguments& a, const Document& d) {
  const Problem& p = a.problem;
  const int64_t group = p.query_heads / p.key_heads;
  for (int64_t head = d.key_head * group; head < (d.key_head + 1) * group; ++head) {
    for (int64_t i = 0; i < d.length; ++i) {
      const Stick stick = break_stick(a, d, i, head);
      double* o = row(a.o, d.b, d.first + i, head);
      std::fill_n(o, p.value_width, 0.0);
      for (int64_t j = 0; j < i; ++j) add_multiple(stick.weights[j], row(a.v, d.b, d.first + j, d.key_head), o, p.value_width);
      *row(a.rest, d.b, d.first + i, head) = stick.rest;
    }
  }
}

// dA_ij = do_i v_j;  dz_ij = A_ij dA_ij (1 - sigmoid(z_ij)) - sigmoid(z_ij) (rest_i drest_i + sum over l < j of A_il dA_il)
void backward(const StickBreakingBackwardArguments& a, const Document& d) {
  const Problem& p = a.problem;
  const int64_t group = p.query_heads / p.key_heads;
  for (int64_t j = 0; j < d.length; ++j) {
    std::fill_n(row(a.dk, d.b, d.first + j, d.key_head), p.key_width, 0.0);
    std::fill_n(row(a.dv, d.b, d.first + j, d.key_head), p.value_width, 0.0);
  }
  for (int64_t head = d.key_head * group; head < (d.key_head + 1) * group; ++head) {
    for (int64_t i = 0; i < d.length; ++i) {
      const Stick stick = break_stick(a, d, i, head);
      const double *q = row(a.q, d.b, d.first + i, head), *d_o = row(a.d_o, d.b, d.first + i, head);
      double* dq = row(a.dq, d.b, d.first + i, head);
      std::fill_n(dq, p.key_width, 0.0);
      double older = a.d_rest.data ? stick.rest * *row(a.d_rest, d.b, d.first + i, head) : 0;
      for (int64_t j = 0; j < i; ++j) {
        const double d_weight = dot(d_o, row(a.v, d.b, d.first + j, d.key_head), p.value_width);
        const double product = stick.weights[j] * d_weight;
        const double d_logit = p.scale * (stick.kept[j] * product - stick.taken[j] * older);
        older += product;
        add_multiple(stick.weights[j], d_o, row(a.dv, d.b, d.first + j, d.key_head), p.value_width);
        add_multiple(d_logit, row(a.k, d.b, d.first + j, d.key_head), dq, p.key_width);
        add_multiple(d_logit, q, row(a.dk, d.b, d.first + j, d.key_head), p.key_width);
      }
    }
  }
}

template <typename Arguments, typename Kernel>
Status run(const Arguments& arguments, Kernel kernel) {
  if (const Status status = check(arguments); !status.ok()) return status;
  if (arguments.problem.dtype != DType::kFloat64) return {"the reference takes float64", static_cast<int64_t>(arguments.problem.dtype)};
  for_each_document(arguments.problem, [&](const Document& document) { kernel(arguments, document); });
  return {};
}

}  // namespace

Status stick_breaking_forward(const StickBreakingForwardArguments& arguments) {
  return run(arguments, [](const auto& a, const Document& d) { forward(a, d); });
}
Status stick_breaking_backward(const StickBreakingBackwardArguments& arguments) {
  return run(arguments, [](const auto& a, const Document& d) { backward(a, d); });
}

}  // namespace pathattn::reference
