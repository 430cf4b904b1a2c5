// forward and backward of cpu.h by way of the float64 reference. Holds the place of the SIMD kernels.
#include <bit>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/reference/reference.h"

namespace pathattn::cpu {
namespace {

double load(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kFloat64) return static_cast<const double*>(data)[at];
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[at]) << 16);
}

void store(void* data, DType dtype, int64_t at, double value) {
  if (dtype == DType::kFloat64) {
    static_cast<double*>(data)[at] = value;
  } else if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = static_cast<float>(value);
  } else {
    const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
    static_cast<uint16_t*>(data)[at] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

DType compute_type(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }

// A float64 copy [batch, tokens, heads, width] of a tensor; empty when the tensor is null.
struct Copy {
  std::vector<double> values;
  int64_t heads = 0, width = 0, tokens = 0;
  ConstView in() const { return {values.empty() ? nullptr : values.data(), tokens * heads * width, heads * width, width}; }
  View out() { return {values.empty() ? nullptr : values.data(), tokens * heads * width, heads * width, width}; }
};

template <typename Visit>
void for_each_element(const Problem& p, const Copy& copy, Visit&& visit) {
  int64_t at = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      for (int64_t h = 0; h < copy.heads; ++h) {
        for (int64_t c = 0; c < copy.width; ++c) visit(at++, b, t, h, c);
      }
    }
  }
}

Copy make(const Problem& p, int64_t heads, int64_t width) { return {std::vector<double>(p.batch * p.tokens * heads * width), heads, width, p.tokens}; }

template <typename AnyView>
Copy read(const Problem& p, const AnyView& x, DType dtype, int64_t heads, int64_t width) {
  if (!x.data) return {};
  Copy copy = make(p, heads, width);
  for_each_element(p, copy, [&](int64_t at, int64_t b, int64_t t, int64_t h, int64_t c) {
    copy.values[at] = load(x.data, dtype, b * x.batch_stride + t * x.token_stride + h * x.head_stride + c);
  });
  return copy;
}

void write(const Problem& p, const Copy& copy, const View& x, DType dtype) {
  if (!x.data) return;
  for_each_element(p, copy, [&](int64_t at, int64_t b, int64_t t, int64_t h, int64_t c) {
    store(x.data, dtype, b * x.batch_stride + t * x.token_stride + h * x.head_stride + c, copy.values[at]);
  });
}

struct Inputs {
  Copy q, k, v, w, beta, g;
  template <typename Arguments>
  explicit Inputs(const Arguments& a) {
    const Problem& p = a.problem;
    const DType compute = compute_type(p.dtype);
    q = read(p, a.q, p.dtype, p.query_heads, p.key_width);
    k = read(p, a.k, p.dtype, p.key_heads, p.key_width);
    v = read(p, a.v, p.dtype, p.key_heads, p.value_width);
    w = read(p, a.w, compute, p.key_heads, p.key_width);
    beta = read(p, a.beta, compute, p.key_heads, 1);
    g = read(p, a.g, compute, p.query_heads, 1);
  }
};

}  // namespace

size_t backward_workspace_size(const Problem&, bool, int) { return 0; }

Status backward(const BackwardArguments& a, void*, const Executor&) {
  if (const Status status = check(a); !status.ok()) return status;
  const Inputs in(a);
  Problem p = a.problem;
  const DType dtype = p.dtype, compute = compute_type(dtype);
  p.dtype = DType::kFloat64;
  const Copy o = read(p, a.o, dtype, p.query_heads, p.value_width), lse = read(p, a.lse, compute, p.query_heads, 1);
  const Copy d_o = read(p, a.d_o, dtype, p.query_heads, p.value_width), d_lse = read(p, a.d_lse, compute, p.query_heads, 1);
  Copy dq = in.q, dk = in.k, dv = in.v, dw = in.w, dbeta = in.beta, dg = in.g;
  const BackwardArguments in_float64{p,         in.q.in(), in.k.in(),   in.v.in(), in.w.in(), in.beta.in(), in.g.in(),   o.in(),  lse.in(),
                                     d_o.in(), d_lse.in(), dq.out(), dk.out(),  dv.out(),  dw.out(),     dbeta.out(), dg.out()};
  if (const Status status = reference::backward(in_float64); !status.ok()) return status;
  write(p, dq, a.dq, dtype);
  write(p, dk, a.dk, dtype);
  write(p, dv, a.dv, dtype);
  write(p, dw, a.dw, compute);
  write(p, dbeta, a.dbeta, compute);
  write(p, dg, a.dg, compute);
  return {};
}

}  // namespace pathattn::cpu
