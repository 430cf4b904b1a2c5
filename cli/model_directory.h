// Where the model lies that a command was asked to use.
#pragma once

#include <filesystem>

namespace pathattn {

// `path` itself if it holds a config.json, the newest whole checkpoint if it is a run. Error if it is neither.
std::filesystem::path find_model_directory(const std::filesystem::path& path);

}  // namespace pathattn
