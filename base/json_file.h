// JSON files that anyone may have damaged: one Error that names the file, never a crash later on.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace pathattn {

// The object that the file holds. Error if the file cannot be read, is a pipe or a device, is not JSON in UTF-8, is not an object, has a field twice,
// or is nested more than 64 deep (comparing and printing a value call themselves for each level, and would run out of stack).
nlohmann::json read_json_object(const std::filesystem::path& path);

}  // namespace pathattn
