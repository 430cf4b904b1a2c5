// The recipe of the trainer's tests.
#pragma once

#include <nlohmann/json.hpp>

#include "base/recipe.h"

namespace pathattn {

// A tiny model on the flip-flop language; `changes` is merged into it.
inline Recipe tiny_recipe(const nlohmann::json& changes = nlohmann::json::object()) {
  nlohmann::json values = {{"model", {{"kind", "path_fox"}, {"hidden_size", 16}, {"num_layers", 1}, {"num_heads", 2}, {"intermediate_size", 32}}},
                           {"data", {{"kind", "flip_flop"}}},
                           {"train",
                            {{"batch_size", 4},
                             {"tokens", 32},
                             {"steps", 12},
                             {"warmup_steps", 8},
                             {"checkpoint_every", 6},
                             {"validate_every", 0},
                             {"gradient_clip", 0.5}}}};
  values.merge_patch(changes);
  return Recipe::from_json(values, "tiny");
}

}  // namespace pathattn
