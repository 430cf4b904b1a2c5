#include "kernels/tests/backend.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "kernels/cpu/cpu.h"
#include "kernels/reference/reference.h"

namespace pathattn::test {

Problem Inputs::problem() const {
  Problem p = shape;
  if (!cu_seqlens.empty()) {
    p.cu_seqlens = cu_seqlens.data();
    p.num_documents = static_cast<int64_t>(cu_seqlens.size()) - 1;
  }
  return p;
}

Inputs Inputs::to(DType dtype) const {
  Inputs other = *this;
  other.shape.dtype = dtype;
  const DType compute = compute_type(dtype);
  other.q = q.to(dtype), other.k = k.to(dtype), other.v = v.to(dtype), other.d_o = d_o.to(dtype);
  other.w = w.to(compute), other.beta = beta.to(compute), other.g = g.to(compute), other.d_lse = d_lse.to(compute);
  return other;
}

namespace {

Inputs each(const Inputs& in, const std::function<Tensor(const Tensor&)>& part) {
  Inputs other = in;
  other.q = part(in.q), other.k = part(in.k), other.v = part(in.v), other.w = part(in.w), other.beta = part(in.beta), other.g = part(in.g);
  other.d_o = part(in.d_o), other.d_lse = part(in.d_lse);
  other.cu_seqlens.clear();
  other.shape.batch = other.q.shape().batch;
  other.shape.tokens = other.q.shape().tokens;
  return other;
}

}  // namespace

Inputs Inputs::document(int64_t n) const {
  const int64_t b = cu_seqlens.empty() ? n : 0, first = cu_seqlens.empty() ? 0 : cu_seqlens[n];
  const int64_t length = cu_seqlens.empty() ? shape.tokens : cu_seqlens[n + 1] - first;
  return each(*this, [&](const Tensor& x) { return x.rows(b, first, length); });
}

Inputs Inputs::tokens(int64_t first, int64_t count) const {
  return each(*this, [&](const Tensor& x) {
    if (x.empty()) return Tensor();
    Tensor part(x.dtype(), {x.shape().batch, count, x.shape().heads, x.shape().width});
    part.fill([&](int64_t b, int64_t t, int64_t h, int64_t c) { return x.at(b, first + t, h, c); });
    return part;
  });
}

void Workers::operator()(int64_t num_tasks, Executor::Task task) const {
  if (order_ == Order::kReversed) {
    for (int64_t i = num_tasks - 1; i >= 0; --i) task(i, static_cast<int>(i % count_));
    return;
  }
  if (count_ == 1) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
    return;
  }
  std::atomic<int64_t> next = 0;
  std::vector<std::thread> threads;
  for (int worker = 0; worker < count_; ++worker) {
    threads.emplace_back([&, worker] {
      for (int64_t i = next++; i < num_tasks; i = next++) task(i, worker);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Backend reference_backend() { return {"reference", reference::forward, reference::backward}; }

Backend cpu_backend(int num_workers, Workers::Order order) {
  const auto call = [=](auto kernel, auto workspace_size, const auto& arguments) {
    // Sizes are defined for arguments that pass the check; the others must be refused by the kernel itself.
    const size_t size = check(arguments).ok() ? workspace_size(arguments.problem, arguments.w.data != nullptr, num_workers) : 0;
    const GuardedMemory workspace(size, 64);
    Workers workers(num_workers, order);
    const Status status = kernel(arguments, workspace.data(), workers.executor());
    if (!workspace.surroundings_untouched()) throw std::runtime_error("written outside the workspace");
    return status;
  };
  return {"cpu", [=](const ForwardArguments& a) { return call(cpu::forward, cpu::forward_workspace_size, a); },
          [=](const BackwardArguments& a) { return call(cpu::backward, cpu::backward_workspace_size, a); }};
}

ForwardArguments forward_arguments(const Inputs& in, const Outputs& out) {
  return {in.problem(), in.q.in(), in.k.in(), in.v.in(), in.w.in(), in.beta.in(), in.g.in(), out.o.out(), out.lse.out(), out.o_rest.out()};
}

BackwardArguments backward_arguments(const Inputs& in, const Outputs& out) {
  return {in.problem(),    in.q.in(),   in.k.in(),     in.v.in(),    in.w.in(),    in.beta.in(), in.g.in(),    out.o.in(),      out.lse.in(),
          out.o_rest.in(), in.d_o.in(), in.d_lse.in(), out.dq.out(), out.dk.out(), out.dv.out(), out.dw.out(), out.dbeta.out(), out.dg.out()};
}

namespace {

void check_outcome(const Status& status, const std::vector<const Tensor*>& written) {
  if (!status.ok()) throw std::runtime_error(status.message + std::string(": ") + std::to_string(status.value));
  for (const Tensor* x : written) {
    if (!x->only_own_elements_written()) throw std::runtime_error("written outside an output");
  }
}

}  // namespace

Outputs forward(const Backend& backend, const Inputs& in, Layout layout, bool with_rest) {
  const Problem& p = in.shape;
  Outputs out;
  out.o = Tensor(p.dtype, {p.batch, p.tokens, p.query_heads, p.value_width}, layout);
  out.lse = Tensor(compute_type(p.dtype), {p.batch, p.tokens, p.query_heads, 1}, layout);
  if (with_rest || (!in.g.empty() && element_size(p.dtype) == 2))
    out.o_rest = Tensor(p.dtype, {p.batch, p.tokens, p.query_heads, p.value_width}, layout);
  check_outcome(backend.forward(forward_arguments(in, out)), {&out.o, &out.lse, &out.o_rest});
  return out;
}

void backward(const Backend& backend, const Inputs& in, Outputs& out, Layout layout) {
  const Problem& p = in.shape;
  const DType compute = compute_type(p.dtype);
  out.dq = Tensor(p.dtype, {p.batch, p.tokens, p.query_heads, p.key_width}, layout);
  out.dk = Tensor(p.dtype, {p.batch, p.tokens, p.key_heads, p.key_width}, layout);
  out.dv = Tensor(p.dtype, {p.batch, p.tokens, p.key_heads, p.value_width}, layout);
  out.dw = in.w.empty() ? Tensor() : Tensor(compute, {p.batch, p.tokens, p.key_heads, p.key_width}, layout);
  out.dbeta = in.beta.empty() ? Tensor() : Tensor(compute, {p.batch, p.tokens, p.key_heads, 1}, layout);
  out.dg = in.g.empty() ? Tensor() : Tensor(compute, {p.batch, p.tokens, p.query_heads, 1}, layout);
  check_outcome(backend.backward(backward_arguments(in, out)), {&out.dq, &out.dk, &out.dv, &out.dw, &out.dbeta, &out.dg});
}

Outputs expected(const Inputs& in, bool with_gradients) {
  const Inputs exact = in.to(DType::kFloat64);
  Outputs out = forward(reference_backend(), exact);
  if (with_gradients) backward(reference_backend(), exact, out);
  return out;
}

}  // namespace pathattn::test
