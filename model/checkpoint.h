// A model directory in the Hugging Face layout: config.json and model.safetensors (or shards and model.safetensors.index.json, read only).
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>

#include "model/language_model.h"

namespace pathattn {

// Writes config.json and model.safetensors (float32) into the existing folder `directory`, each file atomically. For a folder that is whole or
// not there call it inside create_folder_atomically.
void save_model(const LanguageModel& model, const std::filesystem::path& directory);

// F32, F16 and BF16 weights become float32 (float64 if compute_type is). One Error lists all missing shards, or all missing, unexpected and
// misshapen tensors, before any weight is loaded.
LanguageModel load_model(const std::filesystem::path& directory, at::ScalarType compute_type = at::kFloat);

ModelConfig load_config(const std::filesystem::path& directory);

// Tensors of any other kind (optimizer state, recorded logits) in safetensors files.
std::map<std::string, at::Tensor> load_tensors(const std::filesystem::path& path);  // copies, in the file's types
void save_tensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                  const std::map<std::string, std::string>& metadata = {});

}  // namespace pathattn
