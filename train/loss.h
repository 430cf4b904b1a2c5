// The loss of a batch: cross entropy in nats, averaged over the counted targets of the whole batch, however it is cut.
#pragma once

#include <cstdint>
#include <vector>

#include "data/stream.h"
#include "model/language_model.h"
#include "train/optimizer.h"

namespace pathattn {

int64_t count_targets(const Batch& batch);  // those that are not kIgnoreTarget

// float64 scalars on the model's device.
struct BatchResult {
  at::Tensor loss;
  at::Tensor accuracy;       // share of the counted targets that are the likeliest token
  at::Tensor last_accuracy;  // share of the rows whose last target is
};

// Gradients of the loss are added to the optimizer's sum; activations of one of `micro_batches` equal parts of the rows are held at a time.
// Packed documents (cu_seqlens) are one row, so one part. The batch is on the model's device, which is not waited for, and its tokens are
// in the vocabulary.
BatchResult accumulate_gradients(const LanguageModel& model, AdamW& optimizer, const Batch& batch, int64_t micro_batches);

// The loss over all of `batches`, without gradients.
double mean_loss(const LanguageModel& model, const std::vector<Batch>& batches);

}  // namespace pathattn
