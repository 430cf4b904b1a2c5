#include "model/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "base/json_file.h"
#include "base/safetensors.h"
#include "model/parameters.h"
#include "model/tensor_file.h"

namespace pathattn {
namespace {

using nlohmann::json;
using Weights = std::map<std::string, const SafetensorsEntry*>;

constexpr size_t kMaxListed = 20;  // faults in one message

std::string list(const std::vector<std::string>& faults) {
  const std::vector<std::string> first(faults.begin(), faults.begin() + static_cast<int64_t>(std::min(faults.size(), kMaxListed)));
  const std::string rest = faults.size() > kMaxListed ? fmt::format(", and {} more", faults.size() - kMaxListed) : "";
  return fmt::format("{}{}", fmt::join(first, ", "), rest);
}

// The index's map from tensor to file name.
std::map<std::string, std::string> read_index(const std::filesystem::path& path) {
  const json map = read_json_object(path).value("weight_map", json());
  if (!map.is_object() || map.empty()) fail("{}: the object weight_map is missing", path.string());
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : map.items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || std::filesystem::path(name).filename() != name)
      fail("{}: the file of {} must be the name of a file in the same folder, it is {}", path.string(), tensor, file.dump());
    files.emplace(tensor, name);
  }
  return files;
}

// The weight files of a directory, mapped into memory.
class WeightFiles {
 public:
  explicit WeightFiles(const std::filesystem::path& directory) {
    const auto index = directory / "model.safetensors.index.json", single = directory / "model.safetensors";
    if (std::filesystem::exists(index)) {
      open_shards(directory, index);
    } else if (std::filesystem::exists(single)) {
      files_.emplace(single.filename(), single);
      for (const auto& [name, entry] : files_.begin()->second.entries()) weights_.emplace(name, &entry);
    } else {
      fail("{}: neither model.safetensors nor model.safetensors.index.json is there", directory.string());
    }
  }
  const Weights& weights() const { return weights_; }

 private:
  void open_shards(const std::filesystem::path& directory, const std::filesystem::path& index) {
    const auto file_of_tensor = read_index(index);
    std::set<std::string> names;
    for (const auto& [tensor, file] : file_of_tensor) names.insert(file);
    std::vector<std::string> faults;
    for (const std::string& name : names)
      if (!std::filesystem::exists(directory / name)) faults.push_back(name);
    if (!faults.empty()) fail("{}: {} of {} files are missing: {}", index.string(), faults.size(), names.size(), list(faults));
    for (const std::string& name : names) files_.emplace(name, directory / name);
    for (const auto& [tensor, file] : file_of_tensor) {
      const auto& entries = files_.at(file).entries();
      const auto found = entries.find(tensor);
      if (found == entries.end())
        faults.push_back(fmt::format("{} is not in {}", tensor, file));
      else
        weights_.emplace(tensor, &found->second);
    }
    for (const auto& [name, file] : files_)
      for (const auto& [tensor, entry] : file.entries())
        if (!file_of_tensor.contains(tensor) || file_of_tensor.at(tensor) != name)
          faults.push_back(fmt::format("{} in {} is not listed", tensor, name));
    if (!faults.empty()) fail("{}: the index does not fit its files: {}", index.string(), list(faults));
  }

  std::map<std::string, SafetensorsFile> files_;
  Weights weights_;
};

bool is_float(const std::string& dtype) { return dtype == "F32" || dtype == "BF16" || dtype == "F16" || dtype == "F64"; }

void check_weights(const std::vector<ParameterEntry>& table, const Weights& weights, const std::string& where) {
  std::vector<std::string> faults;
  std::set<std::string> expected;
  for (const ParameterEntry& entry : table) {
    expected.insert(entry.name);
    const auto found = weights.find(entry.name);
    if (found == weights.end()) {
      faults.push_back(entry.name + " is missing");
    } else if (found->second->shape != entry.shape) {
      faults.push_back(fmt::format("{} has shape [{}], not [{}]", entry.name, fmt::join(found->second->shape, ", "), fmt::join(entry.shape, ", ")));
    } else if (!is_float(found->second->dtype)) {
      faults.push_back(fmt::format("{} has type {}, not F32, BF16, F16 or F64", entry.name, found->second->dtype));
    }
  }
  for (const auto& [name, entry] : weights)
    if (!expected.contains(name)) faults.push_back(name + " is unexpected");
  if (!faults.empty()) fail("{}: the weights do not fit config.json: {}", where, list(faults));
}

}  // namespace

ModelConfig load_config(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "config.json";
  return ModelConfig::from_json(read_json_object(path), path.string());
}

void save_model(const LanguageModel& model, const std::filesystem::path& directory) {
  const std::map<std::string, at::Tensor> tensors(model.named_parameters().begin(), model.named_parameters().end());
  save_tensors(directory / "model.safetensors", tensors, {{"format", "pt"}});
  write_file_atomically(directory / "config.json", model.config().to_json().dump(2) + "\n");
}

LanguageModel load_model(const std::filesystem::path& directory, at::ScalarType compute_type, at::Device device) {
  const ModelConfig config = load_config(directory);
  const WeightFiles files(directory);
  const std::vector<ParameterEntry> table = parameter_table(config);
  check_weights(table, files.weights(), directory.string());
  const at::ScalarType type = compute_type == at::kDouble ? at::kDouble : at::kFloat;
  std::map<std::string, at::Tensor> parameters;
  for (const ParameterEntry& entry : table) parameters.emplace(entry.name, to_tensor(*files.weights().at(entry.name), entry.name).to(device, type));
  return LanguageModel(config, std::move(parameters), compute_type);
}

}  // namespace pathattn
