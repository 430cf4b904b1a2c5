#include "train/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/json_file.h"
#include "base/say.h"
#include "model/checkpoint.h"
#include "model/tensor_file.h"

namespace pathattn {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kPrefix = "step-";
constexpr const char* kFiles[] = {"config.json", "model.safetensors", "trainer.json", "trainer.safetensors"};  // and checksums.json

// Folders of `run`'s checkpoints with their steps, newest first. A temporary that a killed process left has another name.
std::vector<std::pair<int64_t, fs::path>> list_checkpoints(const fs::path& run) {
  std::vector<std::pair<int64_t, fs::path>> found;
  if (!fs::is_directory(run / "checkpoints")) return found;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints")) {
    const std::string name = entry.path().filename();
    int64_t step = 0;
    if (!entry.is_directory() || !name.starts_with(kPrefix)) continue;
    const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
    if (error == std::errc() && end == name.data() + name.size()) found.emplace_back(step, entry.path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

nlohmann::json checksums(const fs::path& folder) {
  nlohmann::json sums = nlohmann::json::object();
  for (const char* name : kFiles) sums[name] = fmt::format("{:016x}", hash_bytes(read_file(folder / name)));
  return sums;
}

// The trainer.json of a whole checkpoint; Error otherwise. Files that others have put beside ours do not matter.
nlohmann::json read_checkpoint(const fs::path& folder) {
  if (read_json_object(folder / "checksums.json") != checksums(folder)) {
    fail("{} is damaged: its files do not match checksums.json", folder.string());
  }
  return read_json_object(folder / "trainer.json");
}

}  // namespace

fs::path save_checkpoint(const fs::path& run, const LanguageModel& model, const AdamW& optimizer, const nlohmann::json& trainer, int64_t keep) {
  const int64_t step = trainer.at("step");
  const fs::path folder = run / "checkpoints" / fmt::format("{}{:06}", kPrefix, step);
  fs::remove_all(folder);  // only a damaged one, passed over at the start of this process, can be there
  create_folder_atomically(folder, [&](const fs::path& temporary) {
    save_model(model, temporary);
    save_tensors(temporary / "trainer.safetensors", optimizer.state());
    write_file_atomically(temporary / "trainer.json", trainer.dump(2) + "\n");
    write_file_atomically(temporary / "checksums.json", checksums(temporary).dump(2) + "\n");
  });
  for (const auto& [older, path] : list_checkpoints(run)) {
    if (older < step && --keep <= 0) fs::remove_all(path);
  }
  return folder;
}

std::optional<Checkpoint> newest_checkpoint(const fs::path& run) {
  std::string damage;
  for (const auto& [step, folder] : list_checkpoints(run)) {
    try {
      return Checkpoint{folder, read_checkpoint(folder)};
    } catch (const Error& error) {
      damage = error.what();
      say("pathattn: {}; trying the one before\n", damage);
    }
  }
  if (!damage.empty()) fail("no checkpoint in {} is whole: restore one, or start a new run", (run / "checkpoints").string());
  return std::nullopt;
}

}  // namespace pathattn
