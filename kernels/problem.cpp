#include "kernels/problem.h"

#include <cmath>

namespace pathattn {

Status check(const Problem& p) {
  if (p.batch < 0) return {"batch must not be negative", p.batch};
  if (p.tokens < 0) return {"tokens must not be negative", p.tokens};
  if (p.query_heads < 1) return {"query_heads must be at least 1", p.query_heads};
  if (p.key_heads < 1) return {"key_heads must be at least 1", p.key_heads};
  if (p.query_heads % p.key_heads != 0) return {"query_heads must be a multiple of key_heads", p.query_heads};
  if (p.key_width < 1 || p.key_width > kMaxHeadWidth) return {"the width of q and k must be 1 ... 256", p.key_width};
  if (p.value_width < 1 || p.value_width > kMaxHeadWidth) return {"the width of v must be 1 ... 256", p.value_width};
  if (p.dtype != DType::kFloat32 && p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat64) {
    return {"dtype must be float32, bfloat16 or float64", static_cast<int64_t>(p.dtype)};
  }
  if (!std::isfinite(p.scale)) return {"scale must be finite"};
  if (p.cu_seqlens == nullptr) {
    if (p.num_documents != 0) return {"num_documents needs cu_seqlens", p.num_documents};
    return {};
  }
  if (p.batch != 1) return {"cu_seqlens needs batch 1", p.batch};
  if (p.num_documents < 0) return {"cu_seqlens must hold at least one entry, 0", p.num_documents + 1};
  if (p.cu_seqlens[0] != 0) return {"cu_seqlens must start with 0", p.cu_seqlens[0]};
  for (int64_t n = 0; n < p.num_documents; ++n) {
    if (p.cu_seqlens[n + 1] < p.cu_seqlens[n]) return {"cu_seqlens must not decrease", p.cu_seqlens[n + 1]};
  }
  if (p.cu_seqlens[p.num_documents] != p.tokens) return {"the last entry of cu_seqlens must be the number of tokens", p.cu_seqlens[p.num_documents]};
  return {};
}

namespace {

bool is_empty(const Problem& p) { return p.batch == 0 || p.tokens == 0; }

// The tensors of forward and backward alike; what one calls its outputs, the other reads.
template <typename Arguments>
Status check_common(const Arguments& a) {
  if (!a.q.data) return {"q is missing"};
  if (!a.k.data) return {"k is missing"};
  if (!a.v.data) return {"v is missing"};
  if (a.w.data && !a.beta.data) return {"w needs beta"};
  if (a.beta.data && !a.w.data) return {"beta needs w"};
  if (!a.o.data) return {"o is missing"};
  if (!a.lse.data) return {"lse is missing"};
  return {};
}

}  // namespace

Status check(const ForwardArguments& a) {
  if (const Status status = check(a.problem); !status.ok() || is_empty(a.problem)) return status;
  return check_common(a);
}

Status check(const BackwardArguments& a) {
  if (const Status status = check(a.problem); !status.ok() || is_empty(a.problem)) return status;
  if (const Status status = check_common(a); !status.ok()) return status;
  if (!a.d_o.data) return {"d_o is missing"};
  if (!a.dq.data) return {"dq is missing"};
  if (!a.dk.data) return {"dk is missing"};
  if (!a.dv.data) return {"dv is missing"};
  if (!a.w.data != !a.dw.data) return {"dw must be given if and only if w is"};
  if (!a.beta.data != !a.dbeta.data) return {"dbeta must be given if and only if beta is"};
  if (!a.g.data != !a.dg.data) return {"dg must be given if and only if g is"};
  return {};
}

}  // namespace pathattn
