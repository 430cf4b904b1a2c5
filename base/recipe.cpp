#include "base/recipe.h"

#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "base/files.h"
#include "base/nearest_name.h"

namespace pathattn {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMostParts = 16;  // of a key

Json to_json(const toml::node& node, const std::string& key, const std::string& name) {
  const auto convert_table = [&](const toml::table& table) {
    Json values = Json::object();
    for (const auto& [field, value] : table) {
      const std::string_view text = field.str();
      if (text.find('.') != text.npos) fail("{}: the key \"{}\" contains a dot; write a section instead", name, text);
      values[std::string(text)] = to_json(value, key.empty() ? std::string(text) : fmt::format("{}.{}", key, text), name);
    }
    return values;
  };
  const auto convert_array = [&](const toml::array& array) {
    Json values = Json::array();
    for (const toml::node& value : array) values.push_back(to_json(value, key, name));
    return values;
  };
  switch (node.type()) {
    case toml::node_type::table:
      return convert_table(*node.as_table());
    case toml::node_type::array:
      return convert_array(*node.as_array());
    case toml::node_type::string:
      return **node.as_string();
    case toml::node_type::integer:
      return **node.as_integer();
    case toml::node_type::boolean:
      return **node.as_boolean();
    case toml::node_type::floating_point:
      if (std::isfinite(**node.as_floating_point())) return **node.as_floating_point();
      fail("{}: {} must be a finite number", name, key);
    default:
      fail("{}: {} is a date or a time, which no setting takes; write it as a string", name, key);
  }
}

// The parser calls itself for each part of a key, and would run out of stack in one of many thousands.
void refuse_long_keys(std::string_view text, const std::string& name) {
  constexpr std::string_view kOfKeys = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-\"' \t";
  int64_t line = 1, num_dots = 0;
  bool comment = false;
  for (const char c : text) {
    if (c == '\n') ++line;
    comment = c != '\n' && (comment || c == '#');
    if (comment || (c != '.' && kOfKeys.find(c) == kOfKeys.npos)) num_dots = 0;
    if (c == '.' && !comment && ++num_dots >= kMostParts)
      fail("{}, line {}: a key has more than {} parts; write section.field", name, line, kMostParts);
  }
}

// The override's value: any single TOML value, otherwise the text itself.
Json parse_value(const std::string& text, const std::string& key, const std::string& name) {
  std::optional<toml::table> table;
  try {
    table = toml::parse("value = " + text);
  } catch (const toml::parse_error&) {
    return text;
  }
  if (table->size() != 1) return text;  // a line break in the text began a second key
  return to_json(table->begin()->second, key, name);
}

void list_leaves(const Json& values, const std::string& prefix, std::vector<std::string>& leaves) {
  for (const auto& [field, value] : values.items()) {
    const std::string key = prefix.empty() ? field : prefix + "." + field;
    if (value.is_object() && !value.empty()) {
      list_leaves(value, key, leaves);
    } else {
      leaves.push_back(key);
    }
  }
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "\"" : ", \"") + word + "\"";
  return text;
}

}  // namespace

Recipe Recipe::load(const std::filesystem::path& path, const std::vector<std::string>& overrides) {
  const std::string text = read_file(path), name = path.string();
  refuse_long_keys(text, name);
  Recipe recipe(Json::object(), name);
  try {
    recipe.values_ = to_json(toml::parse(text, name), "", name);
  } catch (const toml::parse_error& problem) {
    const toml::source_position where = problem.source().begin;
    fail("{}, line {}, column {}: {}", name, where.line, where.column, problem.description());
  }
  for (const std::string& assignment : overrides) recipe.override_with(assignment);
  return recipe;
}

Recipe Recipe::from_json(const Json& values, std::string name) {
  if (!values.is_object()) fail("{}: a recipe must be an object of sections, not {}", name, values.type_name());
  return Recipe(values, std::move(name));
}

void Recipe::override_with(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) fail("cannot override with \"{}\": write section.field=value", assignment);
  try {
    (void)Json(assignment).dump();
  } catch (const Json::exception&) {
    fail("cannot override {}: the text is not valid UTF-8", Json(assignment).dump(-1, ' ', true, Json::error_handler_t::replace));
  }
  refuse_long_keys(assignment, "--set");
  const std::string key = assignment.substr(0, equals);
  Json value = parse_value(assignment.substr(equals + 1), key, "--set");
  Json* place = &values_;
  std::istringstream parts(key);
  for (std::string part; std::getline(parts, part, '.');) {
    if (part.empty()) fail("cannot override with \"{}\": a part of the key is empty; write section.field=value", assignment);
    if (place->is_null()) *place = Json::object();
    if (!place->is_object()) fail("cannot override {}: {} gives a value, not a section, on the way there", key, name_);
    place = &(*place)[part];
  }
  if (key.back() == '.') fail("cannot override with \"{}\": a part of the key is empty; write section.field=value", assignment);
  if (place->is_object() && !value.is_object()) fail("cannot override {}: it is a section of {}; name one of its fields", key, name_);
  *place = std::move(value);
}

const Json* Recipe::find(const std::string& key) const {
  asked_.insert(key);
  const Json* place = &values_;
  std::istringstream parts(key);
  for (std::string part; std::getline(parts, part, '.');) {
    if (!place->is_object()) return nullptr;
    const auto found = place->find(part);
    if (found == place->end()) return nullptr;
    place = &*found;
  }
  return place;
}

void Recipe::refuse(const std::string& key, const Json& value, const std::string& allowed) const {
  fail("{}: {} = {} must be {}", name_, key, value.dump(-1, ' ', false, Json::error_handler_t::replace), allowed);
}

int64_t Recipe::integer(const std::string& key, int64_t fallback, int64_t low, int64_t high) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  const bool fits = value->is_number_integer() && (!value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX);
  if (!fits || value->get<int64_t>() < low || value->get<int64_t>() > high) {
    refuse(key, *value, high == INT64_MAX ? fmt::format("an integer of at least {}", low) : fmt::format("an integer from {} to {}", low, high));
  }
  return value->get<int64_t>();
}

double Recipe::number(const std::string& key, double fallback, double low, double high) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number() || !(value->get<double>() >= low && value->get<double>() <= high)) {
    refuse(key, *value, std::isinf(high) ? fmt::format("a number of at least {}", low) : fmt::format("a number from {} to {}", low, high));
  }
  return value->get<double>();
}

bool Recipe::boolean(const std::string& key, bool fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) refuse(key, *value, "true or false");
  return value->get<bool>();
}

std::string Recipe::string(const std::string& key, const std::string& fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_string()) refuse(key, *value, "a string");
  return value->get<std::string>();
}

std::string Recipe::choice(const std::string& key, const std::string& fallback, const std::vector<std::string>& allowed) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_string() || std::find(allowed.begin(), allowed.end(), value->get<std::string>()) == allowed.end()) {
    refuse(key, *value, "one of " + joined(allowed));
  }
  return value->get<std::string>();
}

std::vector<std::string> Recipe::strings(const std::string& key, const std::vector<std::string>& fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_string()) return {value->get<std::string>()};
  if (!value->is_array() || !std::all_of(value->begin(), value->end(), [](const Json& item) { return item.is_string(); })) {
    refuse(key, *value, "a string or a list of strings");
  }
  return value->get<std::vector<std::string>>();
}

std::vector<std::pair<std::string, Json>> Recipe::fields(const std::string& section) {
  const Json* values = find(section);
  if (values == nullptr) return {};
  if (!values->is_object()) refuse(section, *values, "a section");
  std::vector<std::string> names;
  list_leaves(*values, "", names);
  std::vector<std::pair<std::string, Json>> fields;
  for (const std::string& name : names) fields.emplace_back(name, *find(section + "." + name));
  return fields;
}

std::vector<Recipe> Recipe::tables(const std::string& key) {
  const Json* values = find(key);
  std::vector<Recipe> tables;
  if (values == nullptr) return tables;
  if (!values->is_array()) refuse(key, *values, fmt::format("tables: write [[{}]]", key));
  for (const Json& value : *values) {
    if (!value.is_object()) refuse(key, *values, fmt::format("tables: write [[{}]]", key));
    tables.push_back(Recipe(value, fmt::format("{}, [[{}]] {}", name_, key, tables.size() + 1)));
  }
  return tables;
}

void Recipe::refuse_unread() const {
  std::vector<std::string> leaves;
  list_leaves(values_, "", leaves);
  for (const std::string& key : leaves) {
    const auto next = asked_.lower_bound(key);
    const bool section = next != asked_.end() && next->starts_with(key + ".");  // an empty section of known fields
    if (asked_.contains(key) || section) continue;
    if (const auto nearest = nearest_name(key, {asked_.begin(), asked_.end()}))
      fail("{}: there is no setting {}; did you mean {}?", name_, key, *nearest);
    fail("{}: there is no setting {}, or other settings leave it without a meaning", name_, key);
  }
}

Json Recipe::json() const { return values_; }

}  // namespace pathattn
