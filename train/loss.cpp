#include "train/loss.h"

#include <torch/torch.h>

#include <algorithm>

namespace pathattn {
namespace {

at::Tensor summed_loss(const LanguageModel& model, const at::Tensor& tokens_BT, const at::Tensor& targets_BT) {
  const at::Tensor logits_BTV = model.forward(tokens_BT);
  return at::cross_entropy_loss(logits_BTV.flatten(0, 1), targets_BT.flatten().to(logits_BTV.device()), {}, at::Reduction::Sum, kIgnoreTarget);
}

}  // namespace

int64_t count_targets(const Batch& batch) { return batch.targets.ne(kIgnoreTarget).sum().item<int64_t>(); }

double accumulate_gradients(const LanguageModel& model, AdamW& optimizer, const Batch& batch, int64_t micro_batches) {
  const double num_targets = static_cast<double>(std::max<int64_t>(count_targets(batch), 1));
  const int64_t num_rows = batch.tokens.size(0) / micro_batches;
  double loss = 0;
  for (int64_t row = 0; row < batch.tokens.size(0); row += num_rows) {
    const at::Tensor part = summed_loss(model, batch.tokens.narrow(0, row, num_rows), batch.targets.narrow(0, row, num_rows)) / num_targets;
    part.backward();
    optimizer.add_gradients();
    loss += part.item<double>();
  }
  return loss;
}

double mean_loss(const LanguageModel& model, const std::vector<Batch>& batches) {
  at::NoGradGuard no_grad;
  double loss = 0;
  int64_t num_targets = 0;
  for (const Batch& batch : batches) {
    loss += summed_loss(model, batch.tokens, batch.targets).item<double>();
    num_targets += count_targets(batch);
  }
  return loss / static_cast<double>(std::max<int64_t>(num_targets, 1));
}

}  // namespace pathattn
