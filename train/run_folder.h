// The folder of a run: whether a run may start or go on there, and its record run.json (docs/training.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace pathattn {

// Error if `run` already holds anything: a new run would mix with it.
void refuse_used_folder(const std::filesystem::path& run);

// Error naming the first field in which `now` (a recipe) differs from `then`, the checkpoint's, other than those that a resumed run may change.
void refuse_changed_recipe(const nlohmann::json& then, const nlohmann::json& now);

void write_record(const std::filesystem::path& run, const nlohmann::json& record);
nlohmann::json read_record(const std::filesystem::path& run);  // Error if there is none

}  // namespace pathattn
