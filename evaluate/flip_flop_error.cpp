#include "evaluate/flip_flop_error.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/error.h"
#include "base/progress.h"
#include "data/flip_flop.h"

namespace pathattn {

ErrorCount count_errors(const LanguageModel& model, const Batch& batch) {
  at::NoGradGuard no_grad;
  const at::Tensor counted_BT = batch.targets.ne(kIgnoreTarget);
  const at::Tensor predicted = model.logits(model.hidden(batch.tokens).index({counted_BT.to(model.device())})).argmax(-1).cpu();
  const at::Tensor targets = batch.targets.index({counted_BT});
  return {.wrong = predicted.ne(targets).sum().item<int64_t>(), .counted = targets.numel()};
}

nlohmann::ordered_json evaluate_flip_flop(const LanguageModel& model, int64_t num_sequences) {
  constexpr uint64_t kTestSeed = 0;
  constexpr int64_t kRowsAtOnce = 32;
  if (model.config().vocabulary_size != kNumFlipFlopTokens) {
    fail("the model has {} tokens, the flip-flop language {}: evaluate it on what it was trained on", model.config().vocabulary_size,
         kNumFlipFlopTokens);
  }
  nlohmann::ordered_json results, reads;
  for (const FlipFlopTestSet& set : kFlipFlopTestSets) {
    const int64_t total = num_sequences > 0 ? num_sequences : set.num_sequences;
    Progress progress(set.name, total, "sequences");
    ErrorCount errors;
    for (int64_t first = 0; first < total; first += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, total - first);
      const ErrorCount more = count_errors(model, set.language.sequences(kTestSeed, kFlipFlopTest, first, count));
      errors = {.wrong = errors.wrong + more.wrong, .counted = errors.counted + more.counted};
      progress.update(first + count, fmt::format("error {:.3f} %", errors.percent()));
    }
    results[set.name] = errors.percent();
    reads[set.name] = errors.counted;
  }
  results["reads"] = reads;
  return results;
}

}  // namespace pathattn
