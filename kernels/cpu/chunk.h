// A run of tokens of one key head, carried to its end: what a decoding state keeps of a chunk.
#pragma once

#include <cstddef>

#include "kernels/problem.h"

namespace pathattn::cpu {

struct Run {
  const void* k = nullptr;     // dtype [tokens, key_width], rows k_stride elements apart
  const void* w = nullptr;     // compute type (float64 when dtype is, else float32) [tokens, key_width], rows w_stride apart
  const void* beta = nullptr;  // compute type [tokens], beta_stride apart
  int64_t k_stride = 0, w_stride = 0, beta_stride = 0;
  int64_t tokens = 0, key_width = 0;
  DType dtype = DType::kFloat32;
};

// Bytes of 64-byte aligned scratch that carry_run needs for runs of any length; one scratch serves one call at a time.
size_t carry_run_scratch_size(DType dtype, int64_t key_width);

// With n = run.tokens, in the compute type, contiguous:
//   keys[j]  = k_j H_{j+1} ... H_n      [tokens, key_width]
//   product  = H_n ... H_2 H_1          [key_width, key_width]; a row vector q of a later token goes through it as q * product
// No alignment is asked of keys and product.
void carry_run(const Run& run, void* keys, void* product, void* scratch);

}  // namespace pathattn::cpu
