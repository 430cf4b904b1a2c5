// Drawing the next token from a model's logits.
#pragma once

#include <cstdint>
#include <span>

#include "base/random.h"

namespace pathattn {

struct SamplingOptions {
  double temperature = 1;  // finite, 0 or more; 0: always the most likely token
  double top_p = 1;        // in (0, 1]: only the most likely tokens that together reach this probability
  int64_t top_k = 0;       // only this many of the most likely tokens; 0: all

  void check() const;  // Error naming the field and its value
};

// A token drawn with probability proportional to exp(logit / temperature) among those that top_k, then top_p, leave. Of equally likely tokens lower
// ones come first. Logits of +infinity share all of the probability; those of -infinity have none. Error if a logit is NaN or all are -infinity.
int64_t sample(std::span<const float> logits, const SamplingOptions& options, Random& random);

}  // namespace pathattn
