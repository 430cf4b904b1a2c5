#include "generate/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/error.h"

namespace pathattn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float largest(std::span<const float> logits) {
  float maximum = -kInfinity;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) fail("the logit of token {} is not a number: the model's weights are damaged or its training diverged", i);
    maximum = std::max(maximum, logits[i]);
  }
  if (maximum == -kInfinity) fail("all logits are -infinity: the model's weights are damaged or its training diverged");
  return maximum;
}

}  // namespace

void SamplingOptions::check() const {
  if (!(temperature >= 0) || !std::isfinite(temperature))
    fail("temperature is {}, it must be a finite number, 0 or more (0: the most likely token)", temperature);
  if (!(top_p > 0 && top_p <= 1)) fail("top_p is {}, it must be more than 0 and at most 1", top_p);
  if (top_k < 0) fail("top_k is {}, it must be 0 (all tokens) or more", top_k);
}

int64_t sample(std::span<const float> logits, const SamplingOptions& options, Random& random) {
  options.check();
  const float maximum = largest(logits);
  if (options.temperature == 0) return std::find(logits.begin(), logits.end(), maximum) - logits.begin();

  std::vector<double> weights(logits.size());
  for (size_t i = 0; i < logits.size(); ++i)  // inf - inf is no number, hence the first case
    weights[i] = logits[i] == maximum ? 1 : std::exp((double{logits[i]} - maximum) / options.temperature);

  std::vector<int64_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  if (options.top_k > 0 || options.top_p < 1)
    std::stable_sort(tokens.begin(), tokens.end(), [&](int64_t a, int64_t b) { return weights[a] > weights[b]; });
  if (options.top_k > 0 && options.top_k < static_cast<int64_t>(tokens.size())) tokens.resize(options.top_k);
  double total = 0;
  for (const int64_t token : tokens) total += weights[token];
  if (options.top_p < 1) {
    const double wanted = options.top_p * total;
    total = 0;
    size_t kept = 0;
    while (kept < tokens.size() && (kept == 0 || total < wanted)) total += weights[tokens[kept++]];
    tokens.resize(kept);
  }
  double remaining = random.uniform() * total;
  for (const int64_t token : tokens) {
    remaining -= weights[token];
    if (remaining < 0) return token;
  }
  // Rounding left a little: the last token that has any probability.
  return *std::find_if(tokens.rbegin(), tokens.rend(), [&](int64_t token) { return weights[token] > 0; });
}

}  // namespace pathattn
