#include "train/metrics.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/files.h"

namespace pathattn {
namespace {

// The leading part of `log` whose lines are whole and belong to steps up to `step`.
std::string keep_until(const std::string& log, int64_t step) {
  std::string kept;
  for (size_t begin = 0, end; (end = log.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const auto line = nlohmann::json::parse(log.begin() + begin, log.begin() + end, nullptr, false);
    const nlohmann::json its_step = line.is_object() ? line.value("step", nlohmann::json()) : nlohmann::json();
    if (its_step.is_number_integer() && its_step <= step) kept.append(log, begin, end + 1 - begin);
  }
  return kept;
}

}  // namespace

Metrics::Metrics(std::filesystem::path path, int64_t step) : path_(std::move(path)) {
  if (std::filesystem::exists(path_)) {
    const std::string log = read_file(path_);
    const std::string kept = keep_until(log, step);
    if (kept.size() != log.size()) write_file_atomically(path_, kept);
  }
  file_.open(path_, std::ios::app);
  if (!file_) fail("cannot open {} for writing: {}", path_.string(), std::strerror(errno));
}

void Metrics::write(const nlohmann::json& line) {
  file_ << line.dump() << '\n' << std::flush;
  if (!file_) fail("cannot write {}: {}; free some space, then continue with --resume", path_.string(), std::strerror(errno));
}

}  // namespace pathattn
