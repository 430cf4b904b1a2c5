// The log of a run: metrics.jsonl, one JSON object a line, each with its "step".
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace pathattn {

class Metrics {
 public:
  // Opens `path` to append. Lines of steps after `step` are cut first, and a line that a crash left unfinished, so that no step stands twice.
  Metrics(std::filesystem::path path, int64_t step);
  void write(const nlohmann::json& line);  // reaches the file at once; Error when the disk is full

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace pathattn
