// What the tasks of one pass of decode share, and where in the workspace it lies. decode.cpp has the stages.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/cpu/layout.h"
#include "kernels/cpu/product_scratch.h"
#include "kernels/decoding_state.h"
#include "kernels/problem.h"

namespace pathattn::cpu {

inline constexpr int64_t kTokensPerPass = 8;

enum class DecodeStage { kAppend, kRead, kCombine, kClose };

// "head" counts (sequence, key head) pairs. A row is one query: token of the pass * group + query head of the group. A part of a row's softmax
// belongs to a page or, after the last page, to the open chunk. The state's lengths are those before the pass.
struct DecodePass {
  ForwardArguments arguments;
  DecodingState state;
  double gate_factor = 1;
  int64_t max_rows = 0, max_parts = 0, scratch_bytes = 0;
  int64_t num_pages = 0;                         // of the longest sequence
  int64_t *firsts = nullptr, *counts = nullptr;  // [sequences] the call's tokens that take part
  void* queries = nullptr;                       // compute [heads, max_rows, K], carried to the open chunk's start
  void *highest = nullptr, *sums = nullptr;      // compute [heads, max_parts, max_rows]
  void* outputs = nullptr;                       // compute [heads, max_parts, max_rows, V], not yet divided
  double* offsets = nullptr;                     // [heads, max_rows, max_parts] g summed from a page's end to the query
  unsigned char* scratch = nullptr;              // [workers, scratch_bytes]
};

// The parts of a head's rows from `row` on that belong to `part`.
template <typename Compute>
struct Parts {
  Compute *highest, *sums, *outputs;
  Parts(const DecodePass& pass, int64_t head, int64_t part, int64_t row) {
    const int64_t at = (head * pass.max_parts + part) * pass.max_rows + row;
    highest = static_cast<Compute*>(pass.highest) + at;
    sums = static_cast<Compute*>(pass.sums) + at;
    outputs = static_cast<Compute*>(pass.outputs) + at * pass.state.value_width;
  }
};

template <typename Compute>
struct WorkerScratch {
  Compute *w, *queries, *scores, *decays;  // [K], [max_rows, max(K, V)], [max_rows, C], [C]
  ProductScratch<Compute> product;
  size_t bytes;
  WorkerScratch(const DecodePass& pass, int worker)
      : WorkerScratch(pass, Arena(pass.scratch ? pass.scratch + worker * pass.scratch_bytes : nullptr)) {}

 private:
  WorkerScratch(const DecodePass& pass, Arena pieces)
      : w(pieces.take<Compute>(pass.state.key_width)),
        queries(pieces.take<Compute>(pass.max_rows * std::max(pass.state.key_width, pass.state.value_width))),
        scores(pieces.take<Compute>(pass.max_rows * kDecodeChunk)),
        decays(pieces.take<Compute>(kDecodeChunk)),
        product(pieces, pass.state.key_width),
        bytes(pieces.used()) {}
};

// The pass, and the bytes of workspace it takes.
inline std::pair<DecodePass, size_t> make_decode_pass(const ForwardArguments& arguments, const DecodingState& state, int num_workers,
                                                      void* workspace) {
  const Problem& p = arguments.problem;
  const bool in_float64 = state.dtype == DType::kFloat64;
  const int64_t heads = state.sequences * state.key_heads;
  DecodePass pass;
  pass.arguments = arguments;
  pass.state = state;
  pass.gate_factor = p.gate_scaled ? p.scale : 1;
  pass.max_rows = std::min(p.tokens, kTokensPerPass) * (state.query_heads / state.key_heads);
  pass.max_parts = state.capacity / kDecodeChunk;
  pass.scratch_bytes = static_cast<int64_t>(in_float64 ? WorkerScratch<double>(pass, 0).bytes : WorkerScratch<float>(pass, 0).bytes);

  Arena pieces(workspace);
  const auto take = [&](int64_t count) -> void* {
    return in_float64 ? static_cast<void*>(pieces.take<double>(count)) : static_cast<void*>(pieces.take<float>(count));
  };
  pass.firsts = pieces.take<int64_t>(state.sequences);
  pass.counts = pieces.take<int64_t>(state.sequences);
  pass.queries = take(heads * pass.max_rows * state.key_width);
  pass.highest = take(heads * pass.max_parts * pass.max_rows);
  pass.sums = take(heads * pass.max_parts * pass.max_rows);
  pass.outputs = take(heads * pass.max_parts * pass.max_rows * state.value_width);
  pass.offsets = pieces.take<double>(state.gate_sums ? heads * pass.max_rows * pass.max_parts : 0);
  pass.scratch = pieces.take<unsigned char>(num_workers * pass.scratch_bytes);
  return {pass, pieces.used()};
}

}  // namespace pathattn::cpu
