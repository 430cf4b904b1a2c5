// The checkpoints of a run: folders checkpoints/step-000300/, each whole or not there.
//
//   config.json, model.safetensors   the model, in the Hugging Face layout
//   trainer.safetensors              the optimizer's moments
//   trainer.json                     what the caller needs to go on: step, data position, recipe, ...
//   checksums.json                   a 64-bit hash of each of these four
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "model/language_model.h"
#include "train/optimizer.h"

namespace pathattn {

struct Checkpoint {
  std::filesystem::path folder;
  nlohmann::json trainer;
};

// Writes the checkpoint of trainer["step"], then deletes earlier ones so that `keep` remain. On failure (a full disk) throws, and they all stay.
std::filesystem::path save_checkpoint(const std::filesystem::path& run, const LanguageModel& model, const AdamW& optimizer,
                                      const nlohmann::json& trainer, int64_t keep);

// The newest whole checkpoint of a run, checksums verified; damaged ones are named on stderr and passed over. Nothing if there is none; Error if
// there are some, but all are damaged.
std::optional<Checkpoint> newest_checkpoint(const std::filesystem::path& run);

}  // namespace pathattn
