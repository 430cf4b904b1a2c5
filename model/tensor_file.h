// Tensors in safetensors files: weights, optimizer state, token ids, logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>

#include "base/safetensors.h"

namespace pathattn {

// A copy in the entry's type. Error naming `name` if PyTorch has no such type.
at::Tensor to_tensor(const SafetensorsEntry& entry, const std::string& name);

std::map<std::string, at::Tensor> load_tensors(const std::filesystem::path& path);
void save_tensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                  const std::map<std::string, std::string>& metadata = {});

}  // namespace pathattn
