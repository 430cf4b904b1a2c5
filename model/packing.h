// Where packed documents lie in a row of tokens, and the same row with room before each document for what came before it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pathattn {

// Tensors are on `device`.
struct Packing {
  at::Tensor cu_seqlens;  // int64 [documents + 1]
  at::Tensor positions;   // int64 [T]: of each token in its document
  int64_t num_documents = 0;

  // The spaced layout: `gap` zero rows before each document.
  int64_t gap = 0, spaced_length = 0;
  at::Tensor spaced_rows;  // int64 [T]: where each token goes
  at::Tensor last_rows;    // int64 [documents * gap]: the last `gap` rows of each document, zeros included where it is shorter

  // Error unless 0 = first <= ... <= last = num_tokens.
  Packing(const at::Tensor& cu_seqlens, int64_t num_tokens, int64_t gap, at::Device device);
};

}  // namespace pathattn
