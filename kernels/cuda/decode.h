// Decoding on CUDA devices, in float32 arithmetic, with the state of kernels/decoding_state.h, so that states move between devices. A CTA takes the
// new tokens of a sequence's key head one after the other: right, but slow for long prompts and for few heads. docs/decoding.md has the rule.
// Calls enqueue work on `stream` and return: they neither allocate nor synchronise. Every pointer is a device pointer.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/decoding_state.h"

namespace pathattn::cuda {

// lengths and cu_seqlens are not checked. Tokens beyond the state's capacity are not kept, and a decoded one's o is NaN.
//
// Makes `state` that of whole documents (batch row n, or span n of cu_seqlens, is sequence n), whatever it held; o and lse are not touched.
Status fill_state(const ForwardArguments& arguments, const DecodingState& state, cudaStream_t stream);
// `problem.tokens` new tokens for every sequence, and their rows of o.
Status decode(const ForwardArguments& arguments, const DecodingState& state, cudaStream_t stream);
// Keys as the last token sees them: out is float32 [sequences, tokens, key_heads, key_width], zero at and beyond a sequence's length.
Status carried_keys(const DecodingState& state, int64_t tokens, const View& out, cudaStream_t stream);

}  // namespace pathattn::cuda
