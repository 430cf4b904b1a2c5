// A run's settings: a TOML file, overridden by `--set a.b=c`, read field by field; what nobody read is refused with the nearest valid key.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pathattn {

class Recipe {
 public:
  // Loads `path` (Error with line and column if malformed) and applies overrides "a.b=c" in order; c is parsed as a TOML value, and taken as a
  // string if it is none. Error names an override without '='.
  static Recipe load(const std::filesystem::path& path, const std::vector<std::string>& overrides = {});
  static Recipe from_json(const nlohmann::json& values, std::string name);  // a recipe saved in a run

  // Each reads `key` ("section.field") or gives `fallback`; a value of another type or outside [low, high] is an Error naming key, value and what is
  // allowed.
  int64_t integer(const std::string& key, int64_t fallback, int64_t low, int64_t high);
  double number(const std::string& key, double fallback, double low, double high);
  bool boolean(const std::string& key, bool fallback);
  std::string string(const std::string& key, const std::string& fallback);
  std::string choice(const std::string& key, const std::string& fallback, const std::vector<std::string>& allowed);
  std::vector<std::string> strings(const std::string& key, const std::vector<std::string>& fallback);  // a single string counts as a list of one

  // Full names and values of all fields of a section and of those below it, in order of name; none if it is absent.
  std::vector<std::pair<std::string, nlohmann::json>> fields(const std::string& section);
  std::vector<Recipe> tables(const std::string& key);  // each [[key]], named by its number in errors

  void refuse_unread() const;                        // Error naming the first key that no call above asked for, and the nearest one that was
  nlohmann::json json() const;                       // all values as given, for saving beside a run
  const std::string& name() const { return name_; }  // the file's path, or the name given to from_json

 private:
  Recipe(nlohmann::json values, std::string name) : values_(std::move(values)), name_(std::move(name)) {}
  const nlohmann::json* find(const std::string& key) const;  // null if absent
  void override_with(const std::string& assignment);
  [[noreturn]] void refuse(const std::string& key, const nlohmann::json& value, const std::string& allowed) const;

  nlohmann::json values_;
  mutable std::set<std::string> asked_;
  std::string name_;
};

}  // namespace pathattn
