// How a model is trained: the section [train] of a recipe. docs/training.md lists the fields.
#pragma once

#include <cstdint>
#include <string>

#include "base/recipe.h"

namespace pathattn {

struct TrainSettings {
  int64_t batch_size;    // rows of one optimizer step
  int64_t tokens;        // tokens of a row
  int64_t accumulation;  // micro-batches that a batch is cut into; divides batch_size
  int64_t steps, warmup_steps;
  double learning_rate, final_learning_rate_fraction;
  double weight_decay, beta1, beta2;
  double gradient_clip;                                 // largest global gradient norm; 0: no clipping
  bool bf16;                                            // products in bfloat16; parameters, moments and gradient sums in float32
  std::string device;                                   // cpu, cuda or cuda:N
  int64_t seed;                                         // of the parameters and of the data's order
  int64_t checkpoint_every, validate_every, log_every;  // steps; 0: never (checkpoints: at the end only)
  int64_t validation_batches, keep_checkpoints;
  double stop_at_accuracy;  // share of right targets of a batch with rows of `tokens` tokens at which training ends; 0: never
  int64_t patience;         // steps without a longer row after which a curriculum ends; 0: any number

  static TrainSettings read(Recipe& recipe);  // Error naming a field that is out of range

  // Linear warm-up to learning_rate, then a cosine that reaches final_learning_rate_fraction of it at the last step. `step` counts from 1.
  double learning_rate_at(int64_t step) const;
};

}  // namespace pathattn
