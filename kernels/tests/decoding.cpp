#include "kernels/tests/decoding.h"

#include <algorithm>
#include <stdexcept>

namespace pathattn::test {
namespace {

// Calls `kernel(workspace, executor)` with a workspace of exactly `size` bytes.
template <typename Kernel>
void call(size_t size, int num_workers, Workers::Order order, Kernel&& kernel) {
  const GuardedMemory workspace(size, 64);
  Workers workers(num_workers, order);
  const Status status = kernel(workspace.data(), workers.executor());
  if (!status.ok()) throw std::runtime_error(status.message + std::string(": ") + std::to_string(status.value));
  if (!workspace.surroundings_untouched()) throw std::runtime_error("written outside the workspace");
}

Outputs make_outputs(const Problem& p) {
  Outputs out;
  out.o = Tensor(p.dtype, {p.batch, p.tokens, p.query_heads, p.value_width});
  out.lse = Tensor(compute_type(p.dtype), {p.batch, p.tokens, p.query_heads, 1});
  return out;
}

void check_memory(const State& state, std::initializer_list<const Tensor*> written) {
  if (!state.surroundings_untouched()) throw std::runtime_error("written outside the decoding state");
  for (const Tensor* x : written) {
    if (!x->only_own_elements_written()) throw std::runtime_error("written outside an output");
  }
}

}  // namespace

State::State(const Inputs& in, int64_t capacity, std::byte fill) : dtype_(in.shape.dtype) {
  const Problem& p = in.shape;
  const int64_t sequences = in.num_documents(), heads = sequences * p.key_heads, square = p.key_width * p.key_width;
  const auto array = [&](bool wanted, int64_t elements, size_t size) -> void* {
    if (!wanted) return nullptr;
    arrays_.emplace_back(elements * size);
    std::fill_n(arrays_.back().data(), elements * size, fill);
    return arrays_.back().data();
  };
  const bool has_w = !in.w.empty();
  const size_t stored = element_size(dtype_), compute = element_size(compute_type(dtype_));
  state_ = {.sequences = sequences,
            .capacity = capacity,
            .query_heads = p.query_heads,
            .key_heads = p.key_heads,
            .key_width = p.key_width,
            .value_width = p.value_width,
            .dtype = dtype_,
            .keys = array(true, heads * capacity * p.key_width, stored),
            .values = array(true, heads * capacity * p.value_width, stored),
            .gate_sums = array(!in.g.empty(), sequences * p.query_heads * capacity, compute),
            .carries = array(has_w, heads * (capacity / kDecodeChunk) * square, compute),
            .open_keys = array(has_w, heads * kDecodeChunk * p.key_width, compute),
            .open_carry = array(has_w, heads * 2 * square, compute),
            .lengths = static_cast<int64_t*>(array(true, sequences, sizeof(int64_t)))};
  std::fill_n(state_.lengths, sequences, 0);
}

std::vector<std::byte> State::bytes() const {
  std::vector<std::byte> all;
  for (const GuardedMemory& array : arrays_) all.insert(all.end(), array.data(), array.data() + array.size());
  return all;
}

bool State::surroundings_untouched() const {
  return std::all_of(arrays_.begin(), arrays_.end(), [](const GuardedMemory& array) { return array.surroundings_untouched(); });
}

Outputs prefill(const Inputs& in, const State& state, int num_workers) {
  const Outputs out = make_outputs(in.shape);
  call(cpu::prefill_workspace_size(in.problem(), !in.w.empty(), num_workers), num_workers, Workers::Order::kThreads,
       [&](void* workspace, const Executor& executor) { return cpu::prefill(forward_arguments(in, out), state.view(), workspace, executor); });
  check_memory(state, {&out.o, &out.lse});
  return out;
}

Outputs decode(const Inputs& in, const State& state, int num_workers, Workers::Order order) {
  const Outputs out = make_outputs(in.shape);
  call(cpu::decode_workspace_size(in.problem(), state.view(), num_workers), num_workers, order,
       [&](void* workspace, const Executor& executor) { return cpu::decode(forward_arguments(in, out), state.view(), workspace, executor); });
  check_memory(state, {&out.o, &out.lse});
  return out;
}

Tensor carried_keys(const State& state, int64_t tokens, int num_workers) {
  const DecodingState& view = state.view();
  const Tensor keys(compute_type(view.dtype), {view.sequences, tokens, view.key_heads, view.key_width}, Layout::kFused);
  call(cpu::carried_keys_workspace_size(view, num_workers), num_workers, Workers::Order::kThreads,
       [&](void* workspace, const Executor& executor) { return cpu::carried_keys(view, tokens, keys.out(), workspace, executor); });
  check_memory(state, {&keys});
  return keys;
}

Case small_case(int64_t tokens) {
  return {.name = "small", .batch = 1, .tokens = tokens, .query_heads = 2, .key_heads = 1, .key_width = 16, .value_width = 8, .gate = Gate::kMild};
}

Inputs with_faint_gates(const Case& c) {
  Inputs in = make_inputs(c);
  in.g.fill([gates = in.g.to(in.g.dtype())](int64_t b, int64_t t, int64_t h, int64_t) { return 0.03 * gates.at(b, t, h); });
  return in;
}

}  // namespace pathattn::test
