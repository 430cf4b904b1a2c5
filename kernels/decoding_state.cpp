#include "kernels/decoding_state.h"

namespace pathattn {

Status check(const DecodingState& state) {
  if (state.sequences < 0) return {"the decoding state's number of sequences must not be negative", state.sequences};
  if (state.capacity < 0 || state.capacity % kDecodeChunk != 0) return {"the decoding state's capacity must be a multiple of 512", state.capacity};
  if (state.query_heads < 1 || state.key_heads < 1 || state.query_heads % state.key_heads != 0) {
    return {"the decoding state's query_heads must be a multiple of its key_heads", state.query_heads};
  }
  if (state.key_width < 1 || state.key_width > kMaxHeadWidth) return {"the decoding state's key_width must be 1 ... 256", state.key_width};
  if (state.value_width < 1 || state.value_width > kMaxHeadWidth) return {"the decoding state's value_width must be 1 ... 256", state.value_width};
  if (state.capacity > 0 && (!state.carries != !state.open_keys || !state.carries != !state.open_carry)) {
    return {"the decoding state must have all or none of carries, open_keys and open_carry"};
  }
  if (state.sequences == 0) return {};
  if (!state.lengths) return {"the decoding state has no lengths"};
  if (state.capacity > 0 && !state.keys) return {"the decoding state has no keys"};
  if (state.capacity > 0 && !state.values) return {"the decoding state has no values"};
  for (int64_t n = 0; n < state.sequences; ++n) {
    if (state.lengths[n] < 0 || state.lengths[n] > state.capacity) return {"a length of the decoding state must be 0 ... capacity", state.lengths[n]};
  }
  return {};
}

Status check(const Problem& p, const DecodingState& state) {
  if (const Status status = check(p); !status.ok()) return status;
  if (const Status status = check(state); !status.ok()) return status;
  if (p.query_heads != state.query_heads) return {"the decoding state has another number of query heads", p.query_heads};
  if (p.key_heads != state.key_heads) return {"the decoding state has another number of key heads", p.key_heads};
  if (p.key_width != state.key_width) return {"the decoding state has another width of q and k", p.key_width};
  if (p.value_width != state.value_width) return {"the decoding state has another width of v", p.value_width};
  if (p.dtype != state.dtype) return {"the decoding state has another dtype", static_cast<int64_t>(p.dtype)};
  const int64_t documents = p.cu_seqlens ? p.num_documents : p.batch;
  if (documents != state.sequences) return {"the decoding state must have one sequence for each batch row or document", documents};
  return {};
}

namespace {

Status check_match(const ForwardArguments& a, const DecodingState& state) {
  if (const Status status = check(a.problem, state); !status.ok()) return status;
  if (a.problem.batch * a.problem.tokens == 0 || state.capacity == 0) return {};  // nothing to match: arrays without elements may be null
  if (!a.g.data != !state.gate_sums) return {"g must be given if and only if the decoding state has gate sums"};
  if (!a.w.data != !state.carries) return {"w and beta must be given if and only if the decoding state has carries"};
  return {};
}

}  // namespace

Status check_prefill(const ForwardArguments& a, const DecodingState& state) {
  const Problem& p = a.problem;
  if (const Status status = check(a); !status.ok()) return status;
  if (const Status status = check_match(a, state); !status.ok()) return status;
  for (int64_t n = 0; n < state.sequences; ++n) {
    const int64_t length = p.cu_seqlens ? p.cu_seqlens[n + 1] - p.cu_seqlens[n] : p.tokens;
    if (state.lengths[n] != 0) return {"prefill needs a decoding state whose sequences have 0 tokens", state.lengths[n]};
    if (length > state.capacity) return {"a document is longer than the decoding state's capacity", length};
  }
  return {};
}

Status check_decode(const ForwardArguments& a, const DecodingState& state) {
  const Problem& p = a.problem;
  ForwardArguments with_lse = a;
  if (!a.lse.data) with_lse.lse = a.o;  // lse is optional here
  if (const Status status = check(with_lse); !status.ok()) return status;
  if (p.cu_seqlens) return {"decode takes no cu_seqlens", p.num_documents};
  if (const Status status = check_match(a, state); !status.ok()) return status;
  for (int64_t n = 0; n < state.sequences; ++n) {
    if (p.tokens > state.capacity - state.lengths[n]) return {"more new tokens than the decoding state has room for", p.tokens};
  }
  return {};
}

Status check_carried_keys(const DecodingState& state, int64_t tokens, const View& out) {
  if (const Status status = check(state); !status.ok()) return status;
  if (tokens < 0) return {"tokens must not be negative", tokens};
  if (state.sequences > 0 && tokens > 0 && !out.data) return {"out is missing"};
  for (int64_t n = 0; n < state.sequences; ++n) {
    if (state.lengths[n] > tokens) return {"out has fewer rows than a sequence has tokens", state.lengths[n]};
  }
  return {};
}

}  // namespace pathattn
