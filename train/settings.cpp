#include "train/settings.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace pathattn {

TrainSettings TrainSettings::read(Recipe& recipe) {
  constexpr int64_t kMany = int64_t{1} << 40;
  TrainSettings settings{
      .batch_size = recipe.integer("train.batch_size", 16, 1, 1 << 20),
      .tokens = recipe.integer("train.tokens", 512, 2, 1 << 24),
      .accumulation = recipe.integer("train.accumulation", 1, 1, 1 << 20),
      .steps = recipe.integer("train.steps", 1000, 1, kMany),
      .warmup_steps = recipe.integer("train.warmup_steps", 20, 0, kMany),
      .learning_rate = recipe.number("train.learning_rate", 1e-3, 0, 100),
      .final_learning_rate_fraction = recipe.number("train.final_learning_rate_fraction", 0.1, 0, 1),
      .weight_decay = recipe.number("train.weight_decay", 0.1, 0, 100),
      .beta1 = recipe.number("train.beta1", 0.9, 0, 0.999999),
      .beta2 = recipe.number("train.beta2", 0.95, 0, 0.999999),
      .gradient_clip = recipe.number("train.gradient_clip", 1, 0, 1e9),
      .bf16 = recipe.choice("train.precision", "fp32", {"fp32", "bf16"}) == "bf16",
      .device = recipe.string("train.device", "cpu"),
      .seed = recipe.integer("train.seed", 1, 0, INT64_MAX),
      .checkpoint_every = recipe.integer("train.checkpoint_every", 100, 0, kMany),
      .validate_every = recipe.integer("train.validate_every", 100, 0, kMany),
      .log_every = recipe.integer("train.log_every", 1, 1, kMany),
      .validation_batches = recipe.integer("train.validation_batches", 4, 1, 1 << 20),
      .keep_checkpoints = recipe.integer("train.keep_checkpoints", 2, 1, 1 << 20),
      .stop_at_accuracy = recipe.number("train.stop_at_accuracy", 0, 0, 1),
      .patience = recipe.integer("train.patience", 0, 0, kMany),
  };
  if (settings.batch_size % settings.accumulation != 0) {
    fail("{}: train.accumulation = {} does not divide train.batch_size = {}: choose a divisor", recipe.name(), settings.accumulation,
         settings.batch_size);
  }
  return settings;
}

double TrainSettings::learning_rate_at(int64_t step) const {
  if (step <= warmup_steps) return learning_rate * static_cast<double>(step) / static_cast<double>(warmup_steps);
  const double done = static_cast<double>(step - warmup_steps) / static_cast<double>(std::max<int64_t>(steps - warmup_steps, 1));
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * std::min(done, 1.0)));
  return learning_rate * (final_learning_rate_fraction + (1 - final_learning_rate_fraction) * cosine);
}

}  // namespace pathattn
