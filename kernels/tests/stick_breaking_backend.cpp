#include "kernels/tests/stick_breaking_backend.h"

#include <set>
#include <stdexcept>
#include <tuple>

#include "kernels/cpu/stick_breaking.h"
#include "kernels/reference/stick_breaking.h"

namespace pathattn::test {

StickBreakingForwardArguments stick_breaking_arguments(const ForwardArguments& a) { return {a.problem, a.q, a.k, a.v, a.o, a.lse}; }
StickBreakingBackwardArguments stick_breaking_arguments(const BackwardArguments& a) {
  return {a.problem, a.q, a.k, a.v, a.d_o, a.d_lse, a.dq, a.dk, a.dv};
}

Backend stick_breaking_reference() {
  return {"reference", [](const ForwardArguments& a) { return reference::stick_breaking_forward(stick_breaking_arguments(a)); },
          [](const BackwardArguments& a) { return reference::stick_breaking_backward(stick_breaking_arguments(a)); }};
}

Backend stick_breaking_cpu(int num_workers, Workers::Order order) {
  const auto call = [=](auto kernel, auto workspace_size, const auto& arguments) {
    const size_t size = check(arguments).ok() ? workspace_size(arguments.problem, num_workers) : 0;
    const GuardedMemory workspace(size, 64);
    Workers workers(num_workers, order);
    const Status status = kernel(arguments, workspace.data(), workers.executor());
    if (!workspace.surroundings_untouched()) throw std::runtime_error("written outside the workspace");
    return status;
  };
  return {"cpu",
          [=](const ForwardArguments& a) {
            return call(cpu::stick_breaking_forward, cpu::stick_breaking_forward_workspace_size, stick_breaking_arguments(a));
          },
          [=](const BackwardArguments& a) {
            return call(cpu::stick_breaking_backward, cpu::stick_breaking_backward_workspace_size, stick_breaking_arguments(a));
          }};
}

const std::vector<Case>& stick_breaking_cases() {
  static const std::vector<Case> all = [] {
    std::vector<Case> chosen;
    std::set<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, DType, std::vector<int64_t>, Layout>> seen;
    for (Case c : cases()) {
      if (!seen.insert({c.batch, c.tokens, c.query_heads, c.key_heads, c.key_width, c.value_width, c.dtype, c.cu_seqlens, c.layout}).second) continue;
      c.w = W::kNone;
      c.gate = Gate::kNone;
      c.gate_scaled = false;
      c.with_d_lse = c.with_d_lse || c.tokens % 2 == 1;
      chosen.push_back(c);
    }
    return chosen;
  }();
  return all;
}

Outputs stick_breaking_expected(const Inputs& in) {
  const Inputs exact = in.to(DType::kFloat64);
  Outputs out = forward(stick_breaking_reference(), exact);
  backward(stick_breaking_reference(), exact, out);
  return out;
}

}  // namespace pathattn::test
