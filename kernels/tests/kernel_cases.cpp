// The table of cases from the command line:  kernel_cases list [PART OF NAME]  |  kernel_cases perf [PART OF NAME [WORKERS]]
// perf prints seconds of one forward and one backward call of the CPU kernels (the best of five) and the relative errors of o, of the worst of dq,
// dk, dv, of dw and of the worse of dbeta, dg, and fails where the table's bounds are missed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "kernels/cpu/cpu.h"
#include "kernels/tests/cases.h"

namespace pathattn::test {
namespace {

template <typename Call>
double best_seconds(Call&& call) {
  double best = 1e300;
  for (int run = 0; run < 5; ++run) {
    const auto start = std::chrono::steady_clock::now();
    call();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

double error(const Tensor& got, const Tensor& want) { return got.empty() || largest(want) == 0 ? 0 : relative_error(got, want); }

// False if a bound is missed.
bool measure(const Case& c, int num_workers) {
  const Inputs in = make_inputs(c);
  const Outputs want = expected(in);
  Outputs out = forward(cpu_backend(num_workers), in, c.layout);
  backward(cpu_backend(num_workers), in, out, c.layout);
  const Tolerance bound = tolerance(c);
  const double o = error(out.o, want.o), dw = error(out.dw, want.dw);
  const double dqkv = std::max({error(out.dq, want.dq), error(out.dk, want.dk), error(out.dv, want.dv)});
  const double dbeta_dg = std::max(error(out.dbeta, want.dbeta), error(out.dg, want.dg));
  const Problem p = in.problem();
  const bool has_w = !in.w.empty();
  const GuardedMemory workspace(std::max(cpu::forward_workspace_size(p, has_w, num_workers), cpu::backward_workspace_size(p, has_w, num_workers)),
                                64);
  Workers workers(num_workers);
  bool ok = true;
  const double forward_seconds = best_seconds([&] { ok &= cpu::forward(forward_arguments(in, out), workspace.data(), workers.executor()).ok(); });
  const double backward_seconds = best_seconds([&] { ok &= cpu::backward(backward_arguments(in, out), workspace.data(), workers.executor()).ok(); });
  const bool right = ok && o <= bound.o && dqkv <= bound.dqkv && dw <= bound.dw && dbeta_dg <= bound.dbeta_dg;
  std::printf("%-40s %10.6f %10.6f  %8.1e %8.1e %8.1e %8.1e%s\n", c.name.c_str(), forward_seconds, backward_seconds, o, dqkv, dw, dbeta_dg,
              right ? "" : "  missed");
  return right;
}

void list(const Case& c) {
  std::printf("%-40s B %lld T %lld HQ %lld H %lld K %lld V %lld%s%s\n", c.name.c_str(), static_cast<long long>(c.batch),
              static_cast<long long>(c.tokens), static_cast<long long>(c.query_heads), static_cast<long long>(c.key_heads),
              static_cast<long long>(c.key_width), static_cast<long long>(c.value_width), c.w == W::kNone ? "" : ", w",
              c.gate == Gate::kNone ? "" : ", gate");
}

}  // namespace
}  // namespace pathattn::test

int main(int argc, char** argv) {
  using namespace pathattn::test;
  const std::string mode = argc > 1 ? argv[1] : "", part = argc > 2 ? argv[2] : "";
  const int num_workers = argc > 3 ? std::atoi(argv[3]) : 1;
  if ((mode != "list" && mode != "perf") || num_workers < 1) {
    std::fprintf(stderr, "usage: kernel_cases list [PART OF NAME]  |  kernel_cases perf [PART OF NAME [WORKERS]]\n");
    return 2;
  }
  if (mode == "perf") std::printf("%-40s %10s %10s  %8s %8s %8s %8s\n", "case", "forward s", "backward s", "o", "dq dk dv", "dw", "dbeta dg");
  bool right = true;
  for (const Case& c : cases()) {
    if (c.name.find(part) == std::string::npos) continue;
    if (mode == "list") list(c);
    if (mode == "perf") right = measure(c, num_workers) && right;
  }
  return right ? 0 : 1;
}
