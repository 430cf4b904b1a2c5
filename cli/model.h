// The model that a command was asked to use: where it lies, on which device and in which precision it computes.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>

#include "model/language_model.h"

namespace pathattn {

// `path` itself if it holds a config.json, the newest whole checkpoint if it is a run. Error if it is neither.
std::filesystem::path find_model_directory(const std::filesystem::path& path);

struct ModelOptions {
  std::string path, device = "cpu", precision = "fp32";

  void add_to(CLI::App& command);                                    // MODEL, --device, --precision
  LanguageModel load(const std::filesystem::path& directory) const;  // directory: find_model_directory(path)
};

inline constexpr const char* kDeviceHelp = "cpu, cuda or cuda:N";

}  // namespace pathattn
