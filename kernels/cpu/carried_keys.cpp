// From a decoding state back to the keys that it stands for: k_j M_J^T P_open^T P_pending^T of closed chunks, and so on.
#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/carried_keys.cpp"
#include "hwy/foreach_target.h"
// foreach_target.h comes first
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/head_state.h"
#include "kernels/cpu/layout.h"
#include "kernels/cpu/rows-inl.h"

#ifndef PATHATTN_KERNELS_CPU_CARRIED_KEYS_SCRATCH_
#define PATHATTN_KERNELS_CPU_CARRIED_KEYS_SCRATCH_
namespace pathattn::cpu {

template <typename Compute>
struct CarriedKeysScratch {
  Compute *matrix, *keys;  // [K, K], [kDecodeBlock, K]
  ProductScratch<Compute> product;
  size_t bytes;
  CarriedKeysScratch(int64_t width, void* memory) : CarriedKeysScratch(width, Arena(memory)) {}

 private:
  CarriedKeysScratch(int64_t width, Arena pieces)
      : matrix(pieces.take<Compute>(width * width)), keys(pieces.take<Compute>(kDecodeBlock * width)), product(pieces, width), bytes(pieces.used()) {}
};

}  // namespace pathattn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu::HWY_NAMESPACE {

template <typename Stored>
void carry_chunk(const HeadState<Stored>& head, int64_t length, int64_t chunk, int64_t tokens, const View& out,
                 const CarriedKeysScratch<ComputeOf<Stored>>& scratch) {
  using Compute = ComputeOf<Stored>;
  const int64_t width = head.key_width, open_start = length - length % kDecodeChunk, pending_start = length - length % kDecodeBlock;
  const int64_t start = chunk * kDecodeChunk, end = std::min(start + kDecodeChunk, tokens);
  Compute *matrix = scratch.matrix, *keys = scratch.keys;
  if (head.has_w && start < pending_start) {
    if (start < open_start) {
      copy_row(head.carry(chunk), width * width, matrix);
      if (pending_start > open_start) multiply_rows(matrix, width, head.open, width, matrix, scratch.product);
    } else {
      set_identity(matrix, width);
    }
    if (length > pending_start) multiply_rows(matrix, width, head.pending, width, matrix, scratch.product);
  }
  for (int64_t block = start; block < end; block += kDecodeBlock) {
    const int64_t count = std::max<int64_t>(0, std::min({end, length, block + kDecodeBlock}) - block);
    if (!head.has_w) {
      read_row(head.keys + block * width, count * width, keys);
    } else if (block < open_start) {
      multiply_rows(head.keys + block * width, count, matrix, width, keys, scratch.product);
    } else if (block < pending_start) {
      multiply_rows(head.open_keys + (block - open_start) * width, count, matrix, width, keys, scratch.product);
    } else {
      copy_row(head.open_keys + (block - open_start) * width, count * width, keys);
    }
    for (int64_t t = block; t < std::min(end, block + kDecodeBlock); ++t) {
      Compute* to = row<Compute>(out, head.sequence, t, head.key_head);
      for (int64_t c = 0; c < width; ++c) to[c] = t < length ? keys[(t - block) * width + c] : 0;
    }
  }
}

void run_chunk(const DecodingState& state, int64_t head, int64_t chunk, int64_t tokens, const View& out, void* scratch) {
  visit_stored_type(state.dtype, [&](auto stored) {
    const HeadState<decltype(stored)> typed(state, head);
    carry_chunk(typed, state.lengths[typed.sequence], chunk, tokens, out, CarriedKeysScratch<ComputeOf<decltype(stored)>>(state.key_width, scratch));
  });
}

}  // namespace pathattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pathattn::cpu {
namespace {

HWY_EXPORT(run_chunk);

size_t scratch_bytes(const DecodingState& state) {
  return state.dtype == DType::kFloat64 ? CarriedKeysScratch<double>(state.key_width, nullptr).bytes
                                        : CarriedKeysScratch<float>(state.key_width, nullptr).bytes;
}

}  // namespace

size_t carried_keys_workspace_size(const DecodingState& state, int num_workers) { return check(state).ok() ? num_workers * scratch_bytes(state) : 0; }

Status carried_keys(const DecodingState& state, int64_t tokens, const View& out, void* workspace, const Executor& executor) {
  if (const Status status = check_carried_keys(state, tokens, out); !status.ok()) return status;
  const int64_t chunks = ceil_div(tokens, kDecodeChunk);
  const auto carry_chunk = HWY_DYNAMIC_DISPATCH(run_chunk);
  executor.parallel_for(state.sequences * state.key_heads * chunks, [&](int64_t task, int worker) {
    carry_chunk(state, task / chunks, task % chunks, tokens, out, static_cast<unsigned char*>(workspace) + worker * scratch_bytes(state));
  });
  return {};
}

}  // namespace pathattn::cpu
#endif
