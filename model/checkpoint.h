// A model directory in the Hugging Face layout: config.json and model.safetensors, or (read only) shards with model.safetensors.index.json.
#pragma once

#include <filesystem>

#include "model/language_model.h"

namespace pathattn {

// Writes config.json and model.safetensors (float32; float64 for a float64 model) into `directory`, each file atomically. For a folder that is whole
// or not there, call it inside create_folder_atomically.
void save_model(const LanguageModel& model, const std::filesystem::path& directory);

// F32, F64, F16 and BF16 weights become float32 (float64 if compute_type is). One Error lists all missing shards, or all missing, unexpected and
// misshapen tensors, before any weight is loaded.
LanguageModel load_model(const std::filesystem::path& directory, at::ScalarType compute_type = at::kFloat, at::Device device = at::kCPU);

ModelConfig load_config(const std::filesystem::path& directory);

}  // namespace pathattn
