// Every call of cpu.h by way of the float64 reference and, for decoding, the paper's in-place rule. Holds the place of the SIMD kernels.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
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

// One sequence's keys as the in-place rule has them, kept in the state's keys; gate_sums holds the gates from each key to the present.
class Sequence {
 public:
  Sequence(const DecodingState& state, int64_t n) : state_(state), n_(n), length_(state.lengths[n]) {}

  void append(const Problem& p, const Inputs& in, int64_t b, int64_t t) {
    const int64_t group = p.query_heads / p.key_heads, token = b * p.tokens + t;
    for (int64_t h = 0; h < p.key_heads; ++h) {
      const double* w = in.w.values.empty() ? nullptr : in.w.values.data() + (token * p.key_heads + h) * p.key_width;
      for (int64_t j = 0; w && j < length_; ++j) {
        double dot = 0;
        for (int64_t c = 0; c < p.key_width; ++c) dot += w[c] * load(state_.keys, state_.dtype, key(h, j) + c);
        dot *= in.beta.values[token * p.key_heads + h];
        for (int64_t c = 0; c < p.key_width; ++c) {
          store(state_.keys, state_.dtype, key(h, j) + c, load(state_.keys, state_.dtype, key(h, j) + c) - dot * w[c]);
        }
      }
      for (int64_t c = 0; c < p.key_width; ++c) {
        store(state_.keys, state_.dtype, key(h, length_) + c, in.k.values[(token * p.key_heads + h) * p.key_width + c]);
      }
      for (int64_t c = 0; c < p.value_width; ++c) {
        store(state_.values, state_.dtype, value(h, length_) + c, in.v.values[(token * p.key_heads + h) * p.value_width + c]);
      }
      for (int64_t a = h * group; state_.gate_sums && a < (h + 1) * group; ++a) {
        const double g = in.g.values[token * p.query_heads + a];
        for (int64_t j = 0; j < length_; ++j) store(state_.gate_sums, compute(), gate(a, j), load(state_.gate_sums, compute(), gate(a, j)) + g);
        store(state_.gate_sums, compute(), gate(a, length_), 0);
      }
    }
    state_.lengths[n_] = ++length_;
  }

  void attend(const Problem& p, const double* q, int64_t head, double* o, double* lse) const {
    const int64_t h = head / (p.query_heads / p.key_heads);
    std::vector<double> s(length_);
    double highest = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int64_t j = 0; j < length_; ++j) {
      for (int64_t c = 0; c < p.key_width; ++c) s[j] += p.scale * q[c] * load(state_.keys, state_.dtype, key(h, j) + c);
      if (state_.gate_sums) s[j] += (p.gate_scaled ? p.scale : 1) * load(state_.gate_sums, compute(), gate(head, j));
      highest = std::max(highest, s[j]);
    }
    for (double& x : s) sum += x = std::exp(x - highest);
    for (int64_t c = 0; c < p.value_width; ++c) o[c] = 0;
    for (int64_t j = 0; j < length_; ++j) {
      for (int64_t c = 0; c < p.value_width; ++c) o[c] += s[j] / sum * load(state_.values, state_.dtype, value(h, j) + c);
    }
    *lse = highest + std::log(sum);
  }

  int64_t key(int64_t h, int64_t j) const { return ((n_ * state_.key_heads + h) * state_.capacity + j) * state_.key_width; }

 private:
  DType compute() const { return compute_type(state_.dtype); }
  int64_t value(int64_t h, int64_t j) const { return ((n_ * state_.key_heads + h) * state_.capacity + j) * state_.value_width; }
  int64_t gate(int64_t a, int64_t j) const { return (n_ * state_.query_heads + a) * state_.capacity + j; }

  const DecodingState& state_;
  int64_t n_, length_;
};

Status check_state(const ForwardArguments& a, const DecodingState& state) {
  const Problem& p = a.problem;
  if (state.query_heads != p.query_heads) return {"the decoding state has another number of query heads", state.query_heads};
  if (state.key_heads != p.key_heads) return {"the decoding state has another number of key heads", state.key_heads};
  if (state.key_width != p.key_width) return {"the decoding state has another key width", state.key_width};
  if (state.value_width != p.value_width) return {"the decoding state has another value width", state.value_width};
  if (state.dtype != p.dtype) return {"the decoding state has another dtype", static_cast<int64_t>(state.dtype)};
  if (p.batch * p.tokens == 0) return {};
  if (!a.g.data != !state.gate_sums) return {"g must be given if and only if the decoding state has gate sums"};
  if (!a.w.data != !state.carries) return {"w must be given if and only if the decoding state has carries"};
  return {};
}

}  // namespace

size_t forward_workspace_size(const Problem&, bool, int) { return 0; }
size_t backward_workspace_size(const Problem&, bool, int) { return 0; }
size_t prefill_workspace_size(const Problem&, bool, int) { return 0; }
size_t decode_workspace_size(const Problem&, const DecodingState&, int) { return 0; }
size_t carried_keys_workspace_size(const DecodingState&, int) { return 0; }

Status forward(const ForwardArguments& a, void*, const Executor&) {
  if (const Status status = check(a); !status.ok()) return status;
  const Inputs in(a);
  Problem p = a.problem;
  p.dtype = DType::kFloat64;
  Copy o = make(p, p.query_heads, p.value_width), lse = make(p, p.query_heads, 1);
  const ForwardArguments in_float64{p, in.q.in(), in.k.in(), in.v.in(), in.w.in(), in.beta.in(), in.g.in(), o.out(), lse.out()};
  if (const Status status = reference::forward(in_float64); !status.ok()) return status;
  write(p, o, a.o, a.problem.dtype);
  write(p, lse, a.lse, compute_type(a.problem.dtype));
  return {};
}

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

Status prefill(const ForwardArguments& a, const DecodingState& state, void* workspace, const Executor& executor) {
  const Problem& p = a.problem;
  if (const Status status = check(a); !status.ok()) return status;
  if (const Status status = check_state(a, state); !status.ok()) return status;
  const int64_t documents = p.cu_seqlens ? p.num_documents : p.batch;
  if (state.sequences != documents) return {"the decoding state must have one sequence for each document", state.sequences};
  for (int64_t n = 0; n < documents; ++n) {
    if (state.lengths[n] != 0) return {"prefill needs an empty decoding state", state.lengths[n]};
    const int64_t length = p.cu_seqlens ? p.cu_seqlens[n + 1] - p.cu_seqlens[n] : p.tokens;
    if (length > state.capacity) return {"a document is longer than the decoding state's capacity", length};
  }
  if (const Status status = forward(a, workspace, executor); !status.ok()) return status;
  const Inputs in(a);
  for (int64_t n = 0; n < documents; ++n) {
    Sequence sequence(state, n);
    const int64_t first = p.cu_seqlens ? p.cu_seqlens[n] : 0, last = p.cu_seqlens ? p.cu_seqlens[n + 1] : p.tokens;
    for (int64_t t = first; t < last; ++t) sequence.append(p, in, p.cu_seqlens ? 0 : n, t);
  }
  return {};
}

Status decode(const ForwardArguments& a, const DecodingState& state, void*, const Executor&) {
  const Problem& p = a.problem;
  ForwardArguments with_lse = a;
  if (!a.lse.data) with_lse.lse = a.o;  // lse is optional here
  if (const Status status = check(with_lse); !status.ok()) return status;
  if (const Status status = check_state(a, state); !status.ok()) return status;
  if (p.cu_seqlens) return {"decode takes no cu_seqlens", p.num_documents};
  if (state.sequences != p.batch) return {"batch must be the decoding state's number of sequences", p.batch};
  for (int64_t n = 0; n < state.sequences; ++n) {
    if (state.lengths[n] + p.tokens > state.capacity) return {"the decoding state is full: its capacity in tokens is", state.capacity};
  }
  const Inputs in(a);
  Copy o = make(p, p.query_heads, p.value_width), lse = make(p, p.query_heads, 1);
  for (int64_t n = 0; n < p.batch; ++n) {
    Sequence sequence(state, n);
    for (int64_t t = 0; t < p.tokens; ++t) {
      sequence.append(p, in, n, t);
      for (int64_t head = 0; head < p.query_heads; ++head) {
        const int64_t at = (n * p.tokens + t) * p.query_heads + head;
        sequence.attend(p, in.q.values.data() + at * p.key_width, head, o.values.data() + at * p.value_width, lse.values.data() + at);
      }
    }
  }
  write(p, o, a.o, p.dtype);
  write(p, lse, a.lse, compute_type(p.dtype));
  return {};
}

Status carried_keys(const DecodingState& state, int64_t tokens, const View& out, void*, const Executor&) {
  if (!out.data) return {"out is missing"};
  for (int64_t n = 0; n < state.sequences; ++n) {
    const Sequence sequence(state, n);
    for (int64_t j = 0; j < tokens; ++j) {
      for (int64_t h = 0; h < state.key_heads; ++h) {
        for (int64_t c = 0; c < state.key_width; ++c) {
          const double value = j < state.lengths[n] ? load(state.keys, state.dtype, sequence.key(h, j) + c) : 0;
          store(out.data, compute_type(state.dtype), n * out.batch_stride + j * out.token_stride + h * out.head_stride + c, value);
        }
      }
    }
  }
  return {};
}

}  // namespace pathattn::cpu
