#include "base/json_file.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/files.h"

namespace pathattn {
namespace fs = std::filesystem;
using nlohmann::json;

json read_json_object(const fs::path& path) {
  static constexpr int kDeepest = 64;
  std::vector<std::set<std::string>> fields;  // of the objects that the parser is in, the innermost last
  const auto check = [&](int depth, json::parse_event_t event, const json& value) {
    if (depth > kDeepest) fail("{}: its JSON is nested more than {} deep; restore the file", path.string(), kDeepest);
    if (event == json::parse_event_t::object_start) fields.emplace_back();
    if (event == json::parse_event_t::object_end) fields.pop_back();
    if (event == json::parse_event_t::key && !fields.back().insert(value.get<std::string>()).second) {
      fail("{}: the field {} appears twice; remove one of them", path.string(), value.dump());
    }
    return true;
  };
  std::error_code error;
  if (fs::is_other(path, error)) fail("cannot read {}: it is not a regular file", path.string());  // a pipe would wait, a device may have no end
  json values;
  try {
    values = json::parse(read_file(path), check);
  } catch (const json::exception& problem) {
    const std::string message = problem.what();  // begins with the library's own number, "[json.exception.parse_error.101] "
    fail("{}: not valid JSON: {}", path.string(), message.substr(message.find("] ") + 2));
  }
  if (!values.is_object()) fail("{}: it must hold a JSON object, not {}", path.string(), values.type_name());
  return values;
}

}  // namespace pathattn
