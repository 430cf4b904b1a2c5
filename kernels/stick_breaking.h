// Stick-breaking attention (Tan et al. 2024, "Stick-breaking Attention", arXiv 2410.17980), on raw pointers. docs/mathematics.md has the derivations.
//
//   z_ij = scale * q_i k_j^T
//   A_ij = sigmoid(z_ij) * product over j < l < i of (1 - sigmoid(z_il))                 (j < i, same document)
//   o_i  = sum_j A_ij v_j          rest_i = 1 - sum_j A_ij = product over l < i of (1 - sigmoid(z_il))
//
// From the newest key to the oldest, each breaks its share off what is left of a stick. A token does not see itself: a document's first has o = 0 and
// rest = 1. Tensors are laid out as in problem.h; rest and its gradient are [batch, tokens, query_heads], float64 when `problem.dtype` is, else
// float32.
#pragma once

#include "kernels/problem.h"

namespace pathattn {

// problem.gate_scaled means nothing here.
struct StickBreakingForwardArguments {
  Problem problem;
  ConstView q, k, v;
  View o, rest;
};

// Nothing that forward wrote is read.
struct StickBreakingBackwardArguments {
  Problem problem;
  ConstView q, k, v;
  ConstView d_o;
  ConstView d_rest;  // or null
  View dq, dk, dv;   // dk, dv are summed over a group's query heads
};

Status check(const StickBreakingForwardArguments& arguments);
Status check(const StickBreakingBackwardArguments& arguments);

}  // namespace pathattn
