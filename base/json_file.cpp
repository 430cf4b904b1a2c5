#include "base/json_file.h"

#include "base/error.h"
#include "base/files.h"

namespace pathattn {
namespace fs = std::filesystem;

nlohmann::json read_json_object(const fs::path& path) {
  using nlohmann::json;
  static constexpr int kDeepest = 64;
  const auto refuse_deep = [&path](int depth, json::parse_event_t, json&) {
    if (depth > kDeepest) fail("{}: its JSON is nested more than {} deep; restore the file", path.string(), kDeepest);
    return true;
  };
  std::error_code error;
  if (fs::is_other(path, error)) fail("cannot read {}: it is not a regular file", path.string());  // a pipe would wait, a device may have no end
  json values;
  try {
    values = json::parse(read_file(path), refuse_deep);
  } catch (const json::exception& problem) {
    fail("{}: not valid JSON: {}", path.string(), problem.what());
  }
  if (!values.is_object()) fail("{}: it must hold a JSON object, not {}", path.string(), values.type_name());
  return values;
}

}  // namespace pathattn
