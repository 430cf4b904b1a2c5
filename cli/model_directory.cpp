#include "cli/model_directory.h"

#include "base/error.h"
#include "train/checkpoint.h"

namespace pathattn {

std::filesystem::path find_model_directory(const std::filesystem::path& path) {
  if (std::filesystem::exists(path / "config.json")) return path;
  if (!std::filesystem::is_directory(path))
    fail("{} is not a folder: give a run (runs/...) or a folder with config.json and model.safetensors", path.string());
  if (const auto checkpoint = newest_checkpoint(path)) return checkpoint->folder;
  fail("{} holds neither a model (config.json) nor a run with a checkpoint (checkpoints/step-...): train it first", path.string());
}

}  // namespace pathattn
