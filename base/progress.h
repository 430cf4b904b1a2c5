// Progress of long work on stderr: a bar with rate and time left on a terminal, a plain line every few seconds when piped.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace pathattn {

class Progress {
 public:
  // label: what is being done; unit: what `total` counts ("steps"). first: where counting starts (a resumed run), so that rates are right.
  Progress(std::string label, int64_t total, std::string unit, int64_t first = 0);
  ~Progress();  // prints the final state and ends the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void update(int64_t done, const std::string& detail = {});  // detail: short, e.g. "loss 1.23"

 private:
  void print(bool last);
  std::string label_, unit_, detail_;
  int64_t total_, first_, done_;
  bool terminal_;
  std::chrono::steady_clock::time_point start_, printed_;
};

}  // namespace pathattn
