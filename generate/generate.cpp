#include "generate/generate.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "base/error.h"

namespace pathattn {
namespace {

struct PackedPrompts {
  at::Tensor tokens_BT, cu_seqlens;
  int64_t longest = 0;
};

PackedPrompts pack(std::vector<std::vector<int64_t>>& prompts, const std::optional<int64_t>& bos) {
  std::vector<int64_t> tokens, ends = {0};
  PackedPrompts packed;
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (prompts[i].empty()) {
      if (!bos) fail("prompt {} is empty, and the model has no token to begin with (bos_token_id): give at least one token", i);
      prompts[i].push_back(*bos);
    }
    tokens.insert(tokens.end(), prompts[i].begin(), prompts[i].end());
    ends.push_back(static_cast<int64_t>(tokens.size()));
    packed.longest = std::max(packed.longest, static_cast<int64_t>(prompts[i].size()));
  }
  packed.tokens_BT = at::tensor(tokens, at::kLong).unsqueeze(0);
  packed.cu_seqlens = at::tensor(ends, at::kLong);
  return packed;
}

}  // namespace

std::vector<std::vector<int64_t>> generate(const LanguageModel& model, std::vector<std::vector<int64_t>> prompts, const GenerateOptions& options,
                                           const OnToken& on_token) {
  options.sampling.check();
  if (options.max_new_tokens < 0) fail("max_new_tokens is {}, it must be 0 or more", options.max_new_tokens);
  const int64_t num_prompts = static_cast<int64_t>(prompts.size());
  std::vector<std::vector<int64_t>> generated(prompts.size());
  if (num_prompts == 0 || options.max_new_tokens == 0) return generated;

  at::NoGradGuard no_gradients;
  const PackedPrompts packed = pack(prompts, model.config().bos_token_id);
  LanguageState state = model.empty_state(num_prompts, packed.longest + options.max_new_tokens);
  const at::Tensor last_rows = (packed.cu_seqlens.narrow(0, 1, num_prompts) - 1).to(model.device());
  at::Tensor hidden_BE = model.prefill(packed.tokens_BT, packed.cu_seqlens, state)[0].index_select(0, last_rows);

  std::vector<Random> randoms;
  for (int64_t i = 0; i < num_prompts; ++i) randoms.emplace_back(options.seed, static_cast<uint64_t>(i));
  std::vector<bool> finished(prompts.size(), false);
  at::Tensor next_BT = at::empty({num_prompts, 1}, at::kLong);
  for (int64_t step = 0;; ++step) {
    const at::Tensor logits_BV = model.logits(hidden_BE).to(at::kCPU, at::kFloat).contiguous();
    const float* rows = logits_BV.const_data_ptr<float>();
    const size_t width = static_cast<size_t>(logits_BV.size(1));
    for (int64_t i = 0; i < num_prompts; ++i) {
      if (finished[i]) continue;  // its row goes on with its last token; nobody reads it
      const int64_t token = sample({rows + i * width, width}, options.sampling, randoms[i]);
      next_BT.mutable_data_ptr<int64_t>()[i] = token;
      finished[i] = token == model.config().eos_token_id;
      if (finished[i]) continue;
      generated[i].push_back(token);
      if (on_token) on_token(i, token);
    }
    if (step + 1 == options.max_new_tokens || std::find(finished.begin(), finished.end(), false) == finished.end()) return generated;
    hidden_BE = model.step(next_BT, state).squeeze(1);
  }
}

}  // namespace pathattn
