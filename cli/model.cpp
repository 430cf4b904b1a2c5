#include "cli/model.h"

#include "base/error.h"
#include "model/checkpoint.h"
#include "model/device.h"
#include "train/checkpoint.h"

namespace pathattn {

std::filesystem::path find_model_directory(const std::filesystem::path& path) {
  if (std::filesystem::exists(path / "config.json")) return path;
  if (!std::filesystem::is_directory(path))
    fail("{} is not a folder: give a run (runs/...) or a folder with config.json and model.safetensors", path.string());
  if (const auto checkpoint = newest_checkpoint(path)) return checkpoint->folder;
  fail("{} holds neither a model (config.json) nor a run with a checkpoint (checkpoints/step-...): train it first", path.string());
}

void ModelOptions::add_to(CLI::App& command) {
  command.add_option("MODEL", path, "A run (its newest checkpoint is used), or a folder with config.json and model.safetensors")->required();
  command.add_option("--device", device, kDeviceHelp)->capture_default_str();
  command.add_option("--precision", precision, "Of matrix products and attention: fp32 or bf16")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
}

LanguageModel ModelOptions::load(const std::filesystem::path& directory) const {
  return load_model(directory, precision == "bf16" ? at::kBFloat16 : at::kFloat, parse_device(device));
}

}  // namespace pathattn
