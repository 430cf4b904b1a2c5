// What every backend of PaTH attention (arXiv 2505.16381) is asked to compute, on raw pointers. docs/mathematics.md has the derivations.
//
//   H_s  = I - beta_s w_s^T w_s                                  w_s, q_i, k_j are row vectors
//   s_ij = scale * q_i H_i H_{i-1} ... H_{j+1} k_j^T  +  sum_{t=j+1..i} g_t          (j <= i, same document)
//   o_i  = sum_j softmax_j(s_ij) v_j          lse_i = log sum_j exp(s_ij)            (natural logarithm)
//
// g is the logarithm of the forget gate (<= 0). With `gate_scaled` its sum is multiplied by `scale` too (flash-linear-attention's convention).
// Without w and beta every H is the identity; without a gate the sum is zero.
//
// Tensors are [batch, tokens, heads, width] or [batch, tokens, heads]; the last dimension of a [.., width] tensor is contiguous, every other
// stride is free. q, o: query_heads; k, v, w, beta: key_heads; g, lse: query_heads. Query head a reads key head a / (query_heads / key_heads).
#pragma once

#include <cstdint>

namespace pathattn {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat64, kFloat16 };  // kFloat16: CUDA devices only

inline constexpr int64_t kMaxHeadWidth = 256;

// Outcome of a kernel call. A failed call has written nothing.
struct [[nodiscard]] Status {
  const char* message = nullptr;  // null when all is well, otherwise what is wrong and what is allowed
  int64_t value = 0;              // the offending value
  bool ok() const { return message == nullptr; }
};

// A tensor in memory. Strides count elements.
struct View {
  void* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
};
struct ConstView {
  const void* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
};

struct Problem {
  int64_t batch = 0, tokens = 0;
  int64_t query_heads = 0, key_heads = 0;  // query_heads is a multiple of key_heads
  int64_t key_width = 0, value_width = 0;  // 1 ... kMaxHeadWidth
  DType dtype = DType::kFloat32;           // q, k, v, o and their gradients
  double scale = 0;
  bool gate_scaled = false;
  const int64_t* cu_seqlens = nullptr;  // [num_documents + 1] on the host, 0 = first <= ... <= last = tokens; needs batch 1; documents may be empty
  int64_t num_documents = 0;            // null cu_seqlens: each batch row is one document
};

// w, beta, g, lse and their gradients are float64 when `problem.dtype` is, else float32.
struct ForwardArguments {
  Problem problem;
  ConstView q, k, v;
  ConstView w, beta;  // both or neither
  ConstView g;        // or null
  View o, lse;
  View o_rest;  // of 16-bit formats on CUDA, or null: what rounding took from o, rounded in turn
};

struct BackwardArguments {
  Problem problem;
  ConstView q, k, v, w, beta, g;
  ConstView o, lse;  // as forward wrote them
  ConstView o_rest;  // likewise, or null; with a gate the fast CUDA path needs it, as there o's rounding can outweigh small gradients
  ConstView d_o;
  ConstView d_lse;  // or null
  View dq, dk, dv;
  View dw, dbeta, dg;  // null where w, beta, g are; dk, dv, dw, dbeta are summed over a group's query heads
};

// Checks shapes, pointers and cu_seqlens; every backend calls it first.
Status check(const Problem& problem);  // shapes and cu_seqlens alone
Status check(const ForwardArguments& arguments);
Status check(const BackwardArguments& arguments);

}  // namespace pathattn
