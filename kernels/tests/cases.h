// The table of cases that every backend is run on, and their inputs. Ids at the start of a name are those of public bug reports cut down to
// one input (docs/numerics.md says more); the other cases cover lengths, widths, documents, gates, strides and formats.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/tests/backend.h"

namespace pathattn::test {

enum class W {
  kNone,      // no w and beta at all
  kUnit,      // random directions of length `w_length`
  kE1,        // e_1 always: the worst case for the inverse of a block
  kRank2,     // random directions in a plane
  kSame,      // one direction always
  kSomeZero,  // every third row zero
  kZero,
};

enum class Gate {
  kNone,
  kZero,
  kMild,         // log sigmoid(N(0, 1) + 4)
  kAlternating,  // 0, -5, 0, -5, ...
  kStrong,       // uniform in (-60, 0)
  kCut,          // uniform in (-0.7, 0), but -inf at token 100
  kNearCut,      // the same with -1e4
};

struct Case {
  std::string name = {};
  int64_t batch = 1, tokens = 0, query_heads = 1, key_heads = 1, key_width = 64, value_width = 64;
  DType dtype = DType::kFloat32;
  W w = W::kUnit;
  double w_length = 1;
  double beta_from = 0, beta_to = 2;  // uniform between the two
  Gate gate = Gate::kNone;
  bool gate_scaled = false;
  std::vector<int64_t> cu_seqlens = {};
  Layout layout = Layout::kContiguous;  // of inputs and outputs
  bool with_d_lse = false;
  uint64_t seed = 1;
};

const std::vector<Case>& cases();

// q, k, v, d_o ~ N(0, 1), rounded to the case's dtype; scale = key_width^-1/2.
Inputs make_inputs(const Case& c);

// Bounds on relative_error (norm of the difference over norm of the oracle) and, for lse, on the largest difference.
struct Tolerance {
  double o, lse, dqkv, dw, dbeta_dg;
};
Tolerance tolerance(const Case& c);

}  // namespace pathattn::test
