// Prefill: forward, then the decoding state of each document.
//   chunks   (document, key head, chunk)   values, gates and keys, carried to the chunk's end or, of the open chunk, to its last whole block's
//   carries  (document, key head)          M_{J-1} = M_J G_J, from the newest chunk to the oldest
#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/prefill.cpp"
#include "hwy/foreach_target.h"
// foreach_target.h comes first
#include <algorithm>

#include "kernels/cpu/chunk.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/head_state.h"
#include "kernels/cpu/layout.h"
#include "kernels/cpu/product_scratch.h"
#include "kernels/cpu/rows-inl.h"

#ifndef PATHATTN_KERNELS_CPU_PREFILL_SCRATCH_
#define PATHATTN_KERNELS_CPU_PREFILL_SCRATCH_
namespace pathattn::cpu {

template <typename Compute>
struct PrefillScratch {
  Compute *keys, *matrix;  // [max(C, K), K], [K, K]
  ProductScratch<Compute> product;
  void* run_scratch;
  size_t bytes;
  PrefillScratch(const Problem& p, void* memory) : PrefillScratch(p, Arena(memory)) {}

 private:
  PrefillScratch(const Problem& p, Arena pieces)
      : keys(pieces.take<Compute>(std::max(kDecodeChunk, p.key_width) * p.key_width)),
        matrix(pieces.take<Compute>(p.key_width * p.key_width)),
        product(pieces, p.key_width),
        run_scratch(pieces.take<unsigned char>(static_cast<int64_t>(carry_run_scratch_size(p.dtype, p.key_width)))),
        bytes(pieces.used()) {}
};

}  // namespace pathattn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu::HWY_NAMESPACE {

template <typename Compute>
void transpose(const Compute* in, int64_t width, Compute* out) {
  for (int64_t r = 0; r < width; ++r) {
    for (int64_t c = 0; c < width; ++c) out[c * width + r] = in[r * width + c];
  }
}

template <typename Stored>
void build_keys(const ForwardArguments& a, const HeadState<Stored>& head, const Document& tokens, int64_t start, int64_t end,
                const PrefillScratch<ComputeOf<Stored>>& scratch) {
  using Compute = ComputeOf<Stored>;
  const int64_t width = head.key_width;
  const auto carry = [&](int64_t first, int64_t count, Compute* keys, Compute* product) {
    const int64_t t = tokens.first + first;
    carry_run({.k = row<Stored>(a.k, tokens.batch, t, head.key_head),
               .w = row<Compute>(a.w, tokens.batch, t, head.key_head),
               .beta = row<Compute>(a.beta, tokens.batch, t, head.key_head),
               .k_stride = a.k.token_stride,
               .w_stride = a.w.token_stride,
               .beta_stride = a.beta.token_stride,
               .tokens = count,
               .key_width = width,
               .dtype = a.problem.dtype},
              keys, scratch.matrix, scratch.run_scratch);
    transpose(scratch.matrix, width, product);
  };
  if (end - start == kDecodeChunk) {
    carry(start, kDecodeChunk, scratch.keys, head.carry(start / kDecodeChunk));  // build_carries turns G into M
    write_row(scratch.keys, kDecodeChunk * width, head.keys + start * width);
    return;
  }
  const int64_t pending = end - end % kDecodeBlock;
  if (pending > start) carry(start, pending - start, head.open_keys, head.open);
  if (end > pending) carry(pending, end - pending, head.open_keys + (pending - start) * width, head.pending);
}

template <typename Stored>
void build_chunk(const ForwardArguments& a, const HeadState<Stored>& head, int64_t chunk, const PrefillScratch<ComputeOf<Stored>>& scratch) {
  using Compute = ComputeOf<Stored>;
  const Document tokens = document(a.problem, head.sequence);
  const int64_t start = chunk * kDecodeChunk, end = std::min(start + kDecodeChunk, tokens.tokens);
  if (start >= end) return;
  for (int64_t t = start; t < end; ++t) {
    copy_row(row<Stored>(a.v, tokens.batch, tokens.first + t, head.key_head), head.value_width, head.values + t * head.value_width);
    if (!head.has_w) copy_row(row<Stored>(a.k, tokens.batch, tokens.first + t, head.key_head), head.key_width, head.keys + t * head.key_width);
  }
  for (int64_t i = 0; head.has_gate && i < head.group; ++i) {
    Compute* gates = head.gates + i * head.capacity;
    for (int64_t t = start; t < end; ++t) gates[t] = *row<Compute>(a.g, tokens.batch, tokens.first + t, head.key_head * head.group + i);
    if (end - start == kDecodeChunk) sum_gates(gates + start);
  }
  if (head.has_w) build_keys(a, head, tokens, start, end, scratch);
}

template <typename Stored>
void build_carries(const ForwardArguments& a, const HeadState<Stored>& head, const PrefillScratch<ComputeOf<Stored>>& scratch) {
  const int64_t width = head.key_width;
  ComputeOf<Stored>*carry = scratch.matrix, *older = scratch.keys;
  set_identity(carry, width);
  for (int64_t chunk = document(a.problem, head.sequence).tokens / kDecodeChunk - 1; chunk >= 0; --chunk) {
    if (chunk > 0) multiply_rows(head.carry(chunk), width, carry, width, older, scratch.product);
    copy_row(carry, width * width, head.carry(chunk));
    std::swap(carry, older);
  }
}

void run_chunk(const ForwardArguments& arguments, const DecodingState& state, int64_t head, int64_t chunk, void* scratch) {
  visit_stored_type(state.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    build_chunk(arguments, HeadState<Stored>(state, head), chunk, PrefillScratch<ComputeOf<Stored>>(arguments.problem, scratch));
  });
}

void run_carries(const ForwardArguments& arguments, const DecodingState& state, int64_t head, void* scratch) {
  visit_stored_type(state.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    build_carries(arguments, HeadState<Stored>(state, head), PrefillScratch<ComputeOf<Stored>>(arguments.problem, scratch));
  });
}

}  // namespace pathattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pathattn::cpu {
namespace {

HWY_EXPORT(run_chunk);
HWY_EXPORT(run_carries);

size_t scratch_bytes(const Problem& p) {
  return p.dtype == DType::kFloat64 ? PrefillScratch<double>(p, nullptr).bytes : PrefillScratch<float>(p, nullptr).bytes;
}

}  // namespace

size_t prefill_workspace_size(const Problem& problem, bool has_w, int num_workers) {
  if (!check(problem).ok()) return 0;
  return std::max(forward_workspace_size(problem, has_w, num_workers), has_w ? num_workers * scratch_bytes(problem) : 0);
}

Status prefill(const ForwardArguments& arguments, const DecodingState& state, void* workspace, const Executor& executor) {
  const Problem& p = arguments.problem;
  if (const Status status = check_prefill(arguments, state); !status.ok()) return status;
  if (const Status status = forward(arguments, workspace, executor); !status.ok()) return status;

  const int64_t max_chunks = ceil_div(longest_document(p), kDecodeChunk);
  const auto scratch = [&](int worker) -> void* { return static_cast<unsigned char*>(workspace) + worker * scratch_bytes(p); };
  const int64_t heads = state.sequences * state.key_heads;
  const auto build_chunk = HWY_DYNAMIC_DISPATCH(run_chunk);
  const auto build_carries = HWY_DYNAMIC_DISPATCH(run_carries);
  executor.parallel_for(heads * max_chunks,
                        [&](int64_t task, int worker) { build_chunk(arguments, state, task / max_chunks, task % max_chunks, scratch(worker)); });
  if (state.carries && max_chunks > 0) {
    executor.parallel_for(heads, [&](int64_t head, int worker) { build_carries(arguments, state, head, scratch(worker)); });
  }
  for (int64_t n = 0; n < state.sequences; ++n) state.lengths[n] = document(p, n).tokens;
  return {};
}

}  // namespace pathattn::cpu
#endif
