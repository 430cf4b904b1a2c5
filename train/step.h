// One step of training: loss of a batch, gradients, clipping, the optimizer's update. On a GPU a CUDA graph (train/step_graph.h).
#pragma once

#include <cstdint>

#include "data/stream.h"
#include "model/language_model.h"
#include "train/optimizer.h"
#include "train/step_graph.h"

namespace pathattn {

struct StepResult {
  double loss, gradient_norm;      // the norm before clipping
  double accuracy, last_accuracy;  // before the update: train/loss.h
};

class TrainingStep {
 public:
  TrainingStep(const LanguageModel& model, AdamW& optimizer, int64_t micro_batches);
  TrainingStep(const TrainingStep&) = delete;
  TrainingStep& operator=(const TrainingStep&) = delete;

  // Nothing is updated if the loss or the norm is not finite.
  StepResult operator()(const Batch& batch, double learning_rate);

 private:
  at::Tensor run(const Batch& batch, const at::Tensor& learning_rate);

  const LanguageModel& model_;
  AdamW& optimizer_;
  int64_t micro_batches_;
  StepWork work_;  // run(), on a GPU by graphs
};

}  // namespace pathattn
