// PaTH attention on a CPU: Highway SIMD, every core, memory linear in the number of tokens.
// docs/cpu-kernels.md explains how.
// Results are bit-identical from run to run and for any number of workers. No call allocates, throws or prints.
#pragma once

#include <cstddef>

#include "kernels/decoding_state.h"
#include "kernels/executor.h"
#include "kernels/problem.h"

namespace pathattn::cpu {

// Bytes of scratch the call of the same name needs, 64-byte aligned; its contents before and after mean nothing. 0 for a problem that is refused.
size_t forward_workspace_size(const Problem& problem, bool has_w, int num_workers);
size_t backward_workspace_size(const Problem& problem, bool has_w, int num_workers);

Status forward(const ForwardArguments& arguments, void* workspace, const Executor& executor);
Status backward(const BackwardArguments& arguments, void* workspace, const Executor& executor);

// Forward over whole documents that also fills `state`, whose lengths must all be 0: document n goes to sequence n.
size_t prefill_workspace_size(const Problem& problem, bool has_w, int num_workers);
Status prefill(const ForwardArguments& arguments, const DecodingState& state, void* workspace, const Executor& executor);

// problem.tokens new tokens for each of problem.batch sequences (sequence n is batch row n; cu_seqlens must be null), one after another:
// o and lse as one forward over each whole sequence would give for these rows. lse may be null.
size_t decode_workspace_size(const Problem& problem, const DecodingState& state, int num_workers);
Status decode(const ForwardArguments& arguments, const DecodingState& state, void* workspace, const Executor& executor);

// Every key carried to its sequence's last token, H_{t} ... H_{j+1} k_j: what the in-place rule of the paper holds.
// out: compute type [sequences, tokens, key_heads, key_width], `tokens` being any number of rows; those at or beyond a sequence's length are zeroed.
size_t carried_keys_workspace_size(const DecodingState& state, int num_workers);
Status carried_keys(const DecodingState& state, int64_t tokens, const View& out, void* workspace, const Executor& executor);

}  // namespace pathattn::cpu
