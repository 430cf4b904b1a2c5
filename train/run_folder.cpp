#include "train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "base/json_file.h"

namespace pathattn {
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

std::string text_of(const json& fields, const std::string& key) { return fields.contains(key) ? fields[key].dump() : "not given"; }

}  // namespace

RunLock::RunLock(const fs::path& run) {
  if (run.empty()) fail("--output is empty: name a folder for the run");
  std::error_code error;
  fs::create_directories(run, error);
  if (error) fail("cannot create the folder {}: {}", run.string(), error.message());
  folder_ = ::open(run.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool taken = folder_ >= 0 && ::flock(folder_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;  // some file systems have no locks at all
  if (!taken) return;
  ::close(folder_);
  fail("another process is training in {}: wait for it, or choose another --output", run.string());
}

RunLock::~RunLock() {
  if (folder_ >= 0) ::close(folder_);
}

void refuse_used_folder(const fs::path& run) {
  if (fs::exists(run) && !fs::is_directory(run)) fail("{} is a file: choose another --output", run.string());
  if (!fs::exists(run) || fs::is_empty(run)) return;
  if (fs::exists(run / "run.json")) fail("{} already holds a run: continue it with --resume, or choose another --output", run.string());
  fail("{} is not empty: choose another --output", run.string());
}

void refuse_changed_recipe(const json& then, const json& now) {
  // Paths of data may change: the data's fingerprint says whether the data did.
  static const std::set<std::string> kMayChange = {
      "/data/files",      "/data/test_reads",          "/train/steps", "/train/checkpoint_every", "/train/keep_checkpoints", "/train/validate_every",
      "/train/log_every", "/train/validation_batches", "/train/device"};
  const json old_fields = then.flatten(), new_fields = now.flatten();
  std::set<std::string> keys;
  for (const json& fields : {old_fields, new_fields}) {
    for (const auto& [key, value] : fields.items()) keys.insert(key);
  }
  for (const std::string& key : keys) {
    const bool kept = old_fields.contains(key) && new_fields.contains(key) && old_fields[key] == new_fields[key];
    if (kept || kMayChange.contains(key)) continue;
    std::string name = key.substr(1);
    std::replace(name.begin(), name.end(), '/', '.');
    fail("{} was {} in this run and is {} now: put it back, choose another --output, or add --allow-changes", name, text_of(old_fields, key),
         text_of(new_fields, key));
  }
}

void write_record(const fs::path& run, const json& record) { write_file_atomically(run / "run.json", record.dump(2) + "\n"); }

json recorded_recipe(const fs::path& run) {
  if (!fs::exists(run / "run.json")) fail("{} holds no run (there is no run.json): check --output", run.string());
  const json record = read_json_object(run / "run.json");
  if (!record.contains("recipe")) fail("{} is damaged: it lacks the recipe; name the RECIPE to go on", (run / "run.json").string());
  return record["recipe"];
}

}  // namespace pathattn
