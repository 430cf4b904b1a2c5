#include "train/step.h"

#include <ATen/Functions.h>

#include "train/loss.h"

namespace pathattn {

TrainingStep::TrainingStep(const LanguageModel& model, AdamW& optimizer, int64_t micro_batches)
    : model_(model), optimizer_(optimizer), micro_batches_(micro_batches) {
  work_ = [this](const Batch& batch, const at::Tensor& rate) { return run(batch, rate); };
#if PATHATTN_CUDA_GRAPHS
  if (model.device().is_cuda()) work_ = by_graphs(std::move(work_), model.device());
#endif
}

at::Tensor TrainingStep::run(const Batch& batch, const at::Tensor& learning_rate) {
  const BatchResult result = accumulate_gradients(model_, optimizer_, batch, micro_batches_);
  const at::Tensor norm = optimizer_.clip_gradients().to(at::kDouble);
  optimizer_.step(learning_rate, at::isfinite(result.loss + norm));
  return at::stack({result.loss, norm, result.accuracy, result.last_accuracy});
}

StepResult TrainingStep::operator()(const Batch& batch, double learning_rate) {
  model_.check_tokens(batch.tokens);
  const at::Tensor rate = at::scalar_tensor(learning_rate, at::kFloat);
  const at::Tensor results = work_(batch, rate);
  const double* values = results.const_data_ptr<double>();
  return {.loss = values[0], .gradient_norm = values[1], .accuracy = values[2], .last_accuracy = values[3]};
}

}  // namespace pathattn
