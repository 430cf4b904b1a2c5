// The folder of a run: whether a run may start or go on there, who works in it, and its record run.json (docs/training.md).
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace pathattn {

// Keeps other processes from training in `run`, which is created if it is not there. The system lets go when the process ends, however it ends.
class RunLock {
 public:
  explicit RunLock(const std::filesystem::path& run);  // Error if another process trains there
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int folder_ = -1;
};

// Error if `run` already holds anything: a new run would mix with it.
void refuse_used_folder(const std::filesystem::path& run);

// Error naming the first field in which `now` (a recipe) differs from `then`, the checkpoint's, other than those that a resumed run may change.
void refuse_changed_recipe(const nlohmann::json& then, const nlohmann::json& now);

void write_record(const std::filesystem::path& run, const nlohmann::json& record);
nlohmann::json recorded_recipe(const std::filesystem::path& run);  // from run.json; Error if there is none

}  // namespace pathattn
