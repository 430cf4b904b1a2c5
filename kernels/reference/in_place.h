// The paper's decoding rule, in place: a step sends every key through its H, then appends its own. The oracle for decoding; float64, allocates.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/problem.h"

namespace pathattn::reference {

class InPlaceDecoder {
 public:
  // Sequences without tokens: problem.batch of them. problem.tokens means nothing.
  explicit InPlaceDecoder(const Problem& problem);

  // Token t of every batch row of the arguments becomes its sequence's newest. w and beta, and g, may be null.
  void append(const ForwardArguments& arguments, int64_t t);
  // o and lse of token t of the arguments, which must be the newest.
  void attend(const ForwardArguments& arguments, int64_t t) const;

  // Key j of a sequence as it now is, H_{length-1} ... H_{j+1} k_j: [key_width].
  const double* key(int64_t sequence, int64_t key_head, int64_t j) const {
    return heads_[sequence * key_heads_ + key_head].keys.data() + j * key_width_;
  }

 private:
  struct Head {
    std::vector<double> keys, values;
    std::vector<std::vector<double>> gates;  // per query head of the group: g summed from behind the key to the newest token
  };
  int64_t key_heads_, key_width_, length_ = 0;
  std::vector<Head> heads_;
};

}  // namespace pathattn::reference
