// Decoding in passes of a few new tokens, none of which leaves its sequence's open chunk. A pass has four stages, and its work is cut by shape alone:
//   append   (sequence, key head)          new tokens join the open chunk and read it; their queries are carried to its start
//   read     (sequence, key head, page)    every query reads one closed chunk: a part of its softmax
//   combine  (sequence, key head)          the parts are added up in order
//   close    (sequence, key head, page)    an open chunk that is full becomes a page
#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode.cpp"
#include "hwy/foreach_target.h"
// foreach_target.h comes first
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/decode_pass.h"
#include "kernels/cpu/head_state.h"
#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu::HWY_NAMESPACE {

// The pending block and its product go through the new token's H; then its key joins them.
template <typename Stored>
void append_key(const DecodePass& pass, const HeadState<Stored>& head, int64_t token, int64_t index, ComputeOf<Stored>* w) {
  using Compute = ComputeOf<Stored>;
  const int64_t width = head.key_width, in_block = index % kDecodeBlock;
  read_row(row<Compute>(pass.arguments.w, head.sequence, token, head.key_head), width, w);
  const Compute beta = *row<Compute>(pass.arguments.beta, head.sequence, token, head.key_head);
  if (in_block == 0) set_identity(head.pending, width);
  reflect_rows(head.pending, width, width, w, beta);
  reflect_rows(head.open_keys + (index - in_block) * width, in_block, width, w, beta);
  read_row(row<Stored>(pass.arguments.k, head.sequence, token, head.key_head), width, head.open_keys + index * width);
}

// The full pending block joins the rest of the open chunk, which is carried over it.
template <typename Stored>
void close_block(const HeadState<Stored>& head, int64_t block_start, const ProductScratch<ComputeOf<Stored>>& scratch) {
  const int64_t width = head.key_width;
  if (block_start == 0) {
    copy_row(head.pending, width * width, head.open);
  } else {
    multiply_rows(head.open_keys, block_start, head.pending, width, head.open_keys, scratch);
    multiply_rows(head.open, width, head.pending, width, head.open, scratch);
  }
}

// Sums of the open chunk's gates after each key but the last, and of all of them.
template <typename Compute>
double sum_open_gates(const Compute* gates, int64_t last, Compute* decays) {
  double sum = 0;
  for (int64_t j = last; j >= 0; --j) {
    decays[j] = static_cast<Compute>(sum);
    sum += gates[j];
  }
  return sum;
}

template <typename Stored>
void append(const DecodePass& pass, int64_t task, int worker) {
  using Compute = ComputeOf<Stored>;
  const HeadState<Stored> head(pass.state, task);
  const WorkerScratch<Compute> scratch(pass, worker);
  const ForwardArguments& a = pass.arguments;
  const Problem& p = a.problem;
  const int64_t n = head.sequence, group = head.group, width = head.key_width;
  const int64_t length = pass.state.lengths[n], num_pages = length / kDecodeChunk, chunk_start = num_pages * kDecodeChunk;
  for (int64_t t = 0; t < pass.counts[n]; ++t) {
    const int64_t token = pass.firsts[n] + t, index = length + t - chunk_start, block_start = index - index % kDecodeBlock;
    const Parts<Compute> parts(pass, task, num_pages, t * group);
    Compute* queries = static_cast<Compute*>(pass.queries) + (task * pass.max_rows + t * group) * width;
    for (int64_t i = 0; i < group; ++i) read_row(row<Stored>(a.q, n, token, head.key_head * group + i), width, queries + i * width);
    copy_row(row<Stored>(a.v, n, token, head.key_head), head.value_width, head.values + (chunk_start + index) * head.value_width);
    if (head.has_w) {
      append_key(pass, head, token, index, scratch.w);
      dot_rows(queries, group, head.open_keys + block_start * width, index - block_start + 1, width, scratch.scores + block_start, kDecodeChunk);
      dot_rows(queries, group, head.pending, width, width, scratch.queries, width);
      dot_rows(scratch.queries, group, head.open_keys, block_start, width, scratch.scores, kDecodeChunk);
      if (block_start > 0) {
        dot_rows(scratch.queries, group, head.open, width, width, queries, width);
      } else {
        copy_row(scratch.queries, group * width, queries);
      }
    } else {
      copy_row(row<Stored>(a.k, n, token, head.key_head), width, head.keys + (chunk_start + index) * width);
      dot_rows(queries, group, head.keys + chunk_start * width, index + 1, width, scratch.scores, kDecodeChunk);
    }
    for (int64_t i = 0; i < group; ++i) {
      Compute* scores = scratch.scores + i * kDecodeChunk;
      const Compute* decays = nullptr;
      if (head.has_gate) {
        Compute* gates = head.gates + i * head.capacity;
        gates[chunk_start + index] = *row<Compute>(a.g, n, token, head.key_head * group + i);
        double* offsets = pass.offsets + (task * pass.max_rows + t * group + i) * pass.max_parts;
        double sum = sum_open_gates(gates + chunk_start, index, scratch.decays);
        for (int64_t page = num_pages - 1; page >= 0; --page) {
          offsets[page] = sum;
          sum += gates[page * kDecodeChunk];
        }
        decays = scratch.decays;
      }
      finish_scores(scores, index + 1, static_cast<Compute>(p.scale), decays, Compute(0), static_cast<Compute>(pass.gate_factor));
      exponentiate(scores, index + 1, parts.highest + i, parts.sums + i);
    }
    weighted_rows(scratch.scores, kDecodeChunk, group, head.values + chunk_start * head.value_width, index + 1, head.value_width, parts.outputs);
    if (head.has_w && index % kDecodeBlock == kDecodeBlock - 1) close_block(head, block_start, scratch.product);
  }
}

template <typename Stored>
void read_page(const DecodePass& pass, int64_t task, int worker) {
  using Compute = ComputeOf<Stored>;
  const int64_t index = task / pass.num_pages, page = task % pass.num_pages;
  const HeadState<Stored> head(pass.state, index);
  const WorkerScratch<Compute> scratch(pass, worker);
  const int64_t n = head.sequence, width = head.key_width, num_rows = pass.counts[n] * head.group;
  const int64_t num_pages = pass.state.lengths[n] / kDecodeChunk, start = page * kDecodeChunk;
  if (page >= num_pages || num_rows == 0) return;
  const Compute* queries = static_cast<const Compute*>(pass.queries) + index * pass.max_rows * width;
  if (head.has_w && page < num_pages - 1) {  // the newest page's M is the identity
    dot_rows(queries, num_rows, head.carry(page), width, width, scratch.queries, width);
    queries = scratch.queries;
  }
  dot_rows(queries, num_rows, head.keys + start * width, kDecodeChunk, width, scratch.scores, kDecodeChunk);
  const Parts<Compute> parts(pass, index, page, 0);
  for (int64_t r = 0; r < num_rows; ++r) {
    Compute* scores = scratch.scores + r * kDecodeChunk;
    const Compute* decays = head.has_gate ? head.gates + (r % head.group) * head.capacity + start + 1 : nullptr;
    const double offset = head.has_gate ? pass.offsets[(index * pass.max_rows + r) * pass.max_parts + page] : 0;
    finish_scores(scores, kDecodeChunk, static_cast<Compute>(pass.arguments.problem.scale), decays, static_cast<Compute>(offset),
                  static_cast<Compute>(pass.gate_factor));
    exponentiate(scores, kDecodeChunk, parts.highest + r, parts.sums + r);
  }
  weighted_rows(scratch.scores, kDecodeChunk, num_rows, head.values + start * head.value_width, kDecodeChunk, head.value_width, parts.outputs);
}

template <typename Stored>
void combine(const DecodePass& pass, int64_t task, int worker) {
  using Compute = ComputeOf<Stored>;
  const HeadState<Stored> head(pass.state, task);
  Compute* o = WorkerScratch<Compute>(pass, worker).queries;
  const int64_t n = head.sequence, num_parts = pass.state.lengths[n] / kDecodeChunk + 1;
  for (int64_t r = 0; r < pass.counts[n] * head.group; ++r) {
    Compute highest = Parts<Compute>(pass, task, 0, r).highest[0];
    for (int64_t part = 1; part < num_parts; ++part) {
      const Compute other = Parts<Compute>(pass, task, part, r).highest[0];
      highest = other > highest ? other : highest;
    }
    double sum = 0;
    for (int64_t c = 0; c < head.value_width; ++c) o[c] = 0;
    for (int64_t part = 0; part < num_parts; ++part) {
      const Parts<Compute> parts(pass, task, part, r);
      const double factor = std::exp(static_cast<double>(parts.highest[0]) - highest);
      sum += factor * parts.sums[0];
      for (int64_t c = 0; c < head.value_width; ++c) o[c] += static_cast<Compute>(factor) * parts.outputs[c];
    }
    for (int64_t c = 0; c < head.value_width; ++c) o[c] /= static_cast<Compute>(sum);
    const int64_t token = pass.firsts[n] + r / head.group, query_head = head.key_head * head.group + r % head.group;
    write_row(o, head.value_width, row<Stored>(pass.arguments.o, n, token, query_head));
    if (pass.arguments.lse.data) *row<Compute>(pass.arguments.lse, n, token, query_head) = static_cast<Compute>(highest + std::log(sum));
  }
}

template <typename Stored>
void close_chunk(const DecodePass& pass, int64_t task, int worker) {
  const int64_t page = task % (pass.num_pages + 1);
  const HeadState<Stored> head(pass.state, task / (pass.num_pages + 1));
  const int64_t length = pass.state.lengths[head.sequence], width = head.key_width, open_page = length / kDecodeChunk;
  if (page > open_page || (length + pass.counts[head.sequence]) / kDecodeChunk == open_page) return;
  if (page < open_page) {
    if (!head.has_w) return;
    return multiply_rows(head.carry(page), width, head.open, width, head.carry(page), WorkerScratch<ComputeOf<Stored>>(pass, worker).product);
  }
  if (head.has_w) {
    write_row(head.open_keys, kDecodeChunk * width, head.keys + page * kDecodeChunk * width);
    set_identity(head.carry(page), width);
  }
  for (int64_t i = 0; head.has_gate && i < head.group; ++i) sum_gates(head.gates + i * head.capacity + page * kDecodeChunk);
}

template <typename Stored>
void run_typed(const DecodePass& pass, DecodeStage stage, int64_t task, int worker) {
  switch (stage) {
    case DecodeStage::kAppend:
      return append<Stored>(pass, task, worker);
    case DecodeStage::kRead:
      return read_page<Stored>(pass, task, worker);
    case DecodeStage::kCombine:
      return combine<Stored>(pass, task, worker);
    case DecodeStage::kClose:
      return close_chunk<Stored>(pass, task, worker);
  }
}

void run_stage(const DecodePass& pass, DecodeStage stage, int64_t task, int worker) {
  visit_stored_type(pass.state.dtype, [&](auto stored) { run_typed<decltype(stored)>(pass, stage, task, worker); });
}

}  // namespace pathattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pathattn::cpu {
namespace {

HWY_EXPORT(run_stage);

void run(const DecodePass& pass, DecodeStage stage, int64_t num_tasks, const Executor& executor) {
  const auto stage_on_this_cpu = HWY_DYNAMIC_DISPATCH(run_stage);
  executor.parallel_for(num_tasks, [&](int64_t task, int worker) { stage_on_this_cpu(pass, stage, task, worker); });
}

// How many of its remaining tokens each sequence takes part with. Returns false when none has any left.
bool plan_pass(DecodePass& pass) {
  const int64_t tokens = pass.arguments.problem.tokens;
  bool any = false;
  pass.num_pages = 0;
  for (int64_t n = 0; n < pass.state.sequences; ++n) {
    const int64_t length = pass.state.lengths[n];
    pass.counts[n] = std::min({tokens - pass.firsts[n], kDecodeChunk - length % kDecodeChunk, kTokensPerPass});
    pass.num_pages = std::max(pass.num_pages, length / kDecodeChunk);
    any = any || pass.counts[n] > 0;
  }
  return any;
}

}  // namespace

size_t decode_workspace_size(const Problem& problem, const DecodingState& state, int num_workers) {
  if (!check(problem, state).ok()) return 0;
  ForwardArguments arguments;
  arguments.problem = problem;
  return make_decode_pass(arguments, state, num_workers, nullptr).second;
}

Status decode(const ForwardArguments& arguments, const DecodingState& state, void* workspace, const Executor& executor) {
  if (const Status status = check_decode(arguments, state); !status.ok()) return status;
  if (arguments.problem.tokens == 0) return {};
  DecodePass pass = make_decode_pass(arguments, state, executor.num_workers, workspace).first;
  const int64_t heads = state.sequences * state.key_heads;
  std::fill_n(pass.firsts, state.sequences, 0);
  while (plan_pass(pass)) {
    run(pass, DecodeStage::kAppend, heads, executor);
    if (pass.num_pages > 0) run(pass, DecodeStage::kRead, heads * pass.num_pages, executor);
    run(pass, DecodeStage::kCombine, heads, executor);
    bool closes = false;
    for (int64_t n = 0; n < state.sequences; ++n) closes = closes || (pass.counts[n] > 0 && (state.lengths[n] + pass.counts[n]) % kDecodeChunk == 0);
    if (closes) run(pass, DecodeStage::kClose, heads * (pass.num_pages + 1), executor);
    for (int64_t n = 0; n < state.sequences; ++n) {
      state.lengths[n] += pass.counts[n];
      pass.firsts[n] += pass.counts[n];
    }
  }
  return {};
}

}  // namespace pathattn::cpu
#endif
