#include "train/loss.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>

namespace pathattn {
namespace {

at::Tensor summed_loss(const at::Tensor& logits_BTV, const at::Tensor& targets_BT) {
  return at::cross_entropy_loss(logits_BTV.flatten(0, 1), targets_BT.flatten().to(logits_BTV.device()), {}, at::Reduction::Sum, kIgnoreTarget);
}

std::optional<at::Tensor> documents(const Batch& batch) { return batch.cu_seqlens.defined() ? std::optional(batch.cu_seqlens) : std::nullopt; }

}  // namespace

int64_t count_targets(const Batch& batch) { return batch.targets.ne(kIgnoreTarget).sum().item<int64_t>(); }

BatchResult accumulate_gradients(const LanguageModel& model, AdamW& optimizer, const Batch& batch, int64_t micro_batches) {
  const at::Tensor num_targets = batch.targets.ne(kIgnoreTarget).sum().clamp_min(1);
  const int64_t batch_size = batch.tokens.size(0), num_rows = batch_size / micro_batches;
  const at::Tensor zero = at::zeros({}, batch.tokens.options().dtype(at::kDouble));
  BatchResult result{zero.clone(), zero.clone(), zero.clone()};
  for (int64_t row = 0; row < batch_size; row += num_rows) {
    const at::Tensor targets_BT = batch.targets.narrow(0, row, num_rows);
    const at::Tensor logits_BTV = model.forward_checked(batch.tokens.narrow(0, row, num_rows), documents(batch));
    const at::Tensor loss = summed_loss(logits_BTV, targets_BT) / num_targets;
    loss.backward();
    optimizer.add_gradients();
    const at::Tensor hits_BT = logits_BTV.detach().argmax(-1).eq(targets_BT);
    result.loss += loss.detach();
    result.accuracy += hits_BT.sum() / num_targets;
    result.last_accuracy += hits_BT.select(1, -1).sum() / static_cast<double>(batch_size);
  }
  return result;
}

double mean_loss(const LanguageModel& model, const std::vector<Batch>& batches) {
  at::NoGradGuard no_grad;
  double loss = 0;
  int64_t num_targets = 0;
  for (const Batch& batch : batches) {
    loss += summed_loss(model.forward(batch.tokens, documents(batch)), batch.targets).item<double>();
    num_targets += count_targets(batch);
  }
  return loss / static_cast<double>(std::max<int64_t>(num_targets, 1));
}

}  // namespace pathattn
