// Backends of PaTH attention as the tests call them: on tensors in guarded memory, with workspace full of NaN, checked after each call.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/executor.h"
#include "kernels/tests/tensor.h"

namespace pathattn::test {

struct Inputs {
  Problem shape;                    // without cu_seqlens and num_documents, which `problem` adds
  std::vector<int64_t> cu_seqlens;  // empty: every batch row is a document
  Tensor q, k, v, w, beta, g, d_o, d_lse;

  Problem problem() const;
  int64_t num_documents() const { return cu_seqlens.empty() ? shape.batch : static_cast<int64_t>(cu_seqlens.size()) - 1; }
  Inputs to(DType dtype) const;
  Inputs document(int64_t n) const;                   // that document alone
  Inputs tokens(int64_t first, int64_t count) const;  // these tokens of each batch row
};

struct Outputs {
  Tensor o, lse, dq, dk, dv, dw, dbeta, dg;
  Tensor o_rest;  // asked for with a gate and 16 bits
};

// Threads that share out the tasks of a kernel call in no fixed order.
class Workers {
 public:
  enum class Order { kThreads, kReversed };  // kReversed: no threads, last task first, workers by turns
  explicit Workers(int count, Order order = Order::kThreads) : count_(count), order_(order) {}
  Executor executor() { return {count_, *this}; }
  void operator()(int64_t num_tasks, Executor::Task task) const;

 private:
  int count_;
  Order order_;
};

struct Backend {
  std::string name;
  std::function<Status(const ForwardArguments&)> forward;
  std::function<Status(const BackwardArguments&)> backward;
};

Backend reference_backend();
Backend cpu_backend(int num_workers = 1, Workers::Order order = Workers::Order::kThreads);

ForwardArguments forward_arguments(const Inputs& in, const Outputs& out);
BackwardArguments backward_arguments(const Inputs& in, const Outputs& out);

// Throw std::runtime_error with the status' message, or when memory outside the outputs was written.
Outputs forward(const Backend& backend, const Inputs& in, Layout layout = Layout::kContiguous, bool with_rest = false);
void backward(const Backend& backend, const Inputs& in, Outputs& out, Layout layout = Layout::kContiguous);

// Forward and backward by the reference, in float64, of the same rounded inputs.
Outputs expected(const Inputs& in, bool with_gradients = true);

}  // namespace pathattn::test
