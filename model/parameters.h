// The table of a model's parameters: names, shapes, starting values. What is saved, loaded, counted and optimised is this list.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"

namespace pathattn {

enum class Start { kNormal, kZeros, kOnes };  // kNormal: mean 0, standard deviation 0.02

struct ParameterEntry {
  std::string name;  // as in model.safetensors
  std::vector<int64_t> shape;
  Start start;
  bool weight_decay;  // false for norms, biases and log gates
};

std::vector<ParameterEntry> parameter_table(const ModelConfig& config);

int64_t num_parameters(const ModelConfig& config);

// Names in one layer: prefixes that end in a dot, and two whole names.
struct LayerNames {
  std::string attention, mlp, attention_norm, mlp_norm;
};
LayerNames layer_names(const ModelConfig& config, int64_t layer);

}  // namespace pathattn
