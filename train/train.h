// Training of a language model from a recipe. docs/training.md lists the recipe's fields, the files of a run and what is guaranteed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/recipe.h"

namespace pathattn {

struct TrainOptions {
  bool resume = false;         // continue a run from its newest checkpoint; a folder without a run starts one
  bool allow_changes = false;  // with resume: accept data or a recipe that differ from the checkpoint's
  std::string device = {};     // instead of the recipe's train.device, if not empty
};

struct TrainResult {
  int64_t step = 0;  // the last one done
  int signal = 0;    // SIGINT or SIGTERM if it ended the run early; a checkpoint of `step` was saved
};

// Trains in the folder `run` until the recipe's last step, its stop_at_accuracy, its patience or a signal. Error, and nothing lost: a folder that
// already holds something (without resume), a recipe or data that changed, a write that fails, a loss that is not finite.
TrainResult train(Recipe recipe, const std::filesystem::path& run, const TrainOptions& options = {});

// Error if train() would refuse the recipe or the device, whatever the folder. Writes nothing.
void check_recipe(Recipe recipe, const std::string& device);

// The recipe that a run was started with.
Recipe recipe_of_run(const std::filesystem::path& run);

}  // namespace pathattn
