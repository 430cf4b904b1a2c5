#include "kernels/stick_breaking.h"

namespace pathattn {
namespace {

template <typename Arguments>
Status check_inputs(const Arguments& a) {
  if (const Status status = check(a.problem); !status.ok()) return status;
  if (!a.q.data) return {"q is missing"};
  if (!a.k.data) return {"k is missing"};
  if (!a.v.data) return {"v is missing"};
  return {};
}

bool is_empty(const Problem& p) { return p.batch == 0 || p.tokens == 0; }

}  // namespace

Status check(const StickBreakingForwardArguments& a) {
  if (is_empty(a.problem)) return check(a.problem);
  if (const Status status = check_inputs(a); !status.ok()) return status;
  if (!a.o.data) return {"o is missing"};
  if (!a.rest.data) return {"rest is missing"};
  return {};
}

Status check(const StickBreakingBackwardArguments& a) {
  if (is_empty(a.problem)) return check(a.problem);
  if (const Status status = check_inputs(a); !status.ok()) return status;
  if (!a.d_o.data) return {"d_o is missing"};
  if (!a.dq.data) return {"dq is missing"};
  if (!a.dk.data) return {"dk is missing"};
  if (!a.dv.data) return {"dv is missing"};
  return {};
}

}  // namespace pathattn
