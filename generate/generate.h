// Continuing prompts with a model: one prefill of all prompts, packed, then one token a step for all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "generate/sampler.h"
#include "model/language_model.h"

namespace pathattn {

struct GenerateOptions {
  int64_t max_new_tokens = 200;
  uint64_t seed = 0;
  SamplingOptions sampling = {};
};

// Called with each new token as soon as it is drawn; `prompt` counts from 0.
using OnToken = std::function<void(int64_t prompt, int64_t token)>;

// The new tokens of each prompt: max_new_tokens, or fewer where the configuration's eos_token_id was drawn (it is left out). What a prompt gets
// depends on its own tokens, its number and the seed, not on the other prompts. An empty prompt begins with bos_token_id; without one it is an Error.
std::vector<std::vector<int64_t>> generate(const LanguageModel& model, std::vector<std::vector<int64_t>> prompts, const GenerateOptions& options,
                                           const OnToken& on_token = {});

}  // namespace pathattn
