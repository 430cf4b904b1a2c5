// How often a model is wrong on the flip-flop language: at the bits after reads, on the three test sets (data/flip_flop.h).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "data/stream.h"
#include "model/language_model.h"

namespace pathattn {

struct ErrorCount {
  int64_t wrong = 0, counted = 0;
  double percent() const { return counted == 0 ? 0 : 100.0 * static_cast<double>(wrong) / static_cast<double>(counted); }
};

// Counted targets of `batch`, and those that are not the model's likeliest next token.
ErrorCount count_errors(const LanguageModel& model, const Batch& batch);

// {"in_distribution": error in %, "sparse": ..., "dense": ..., "reads": {"in_distribution": counted targets, ...}}
// num_sequences: of each set; 0: as many as the set has.
nlohmann::ordered_json evaluate_flip_flop(const LanguageModel& model, int64_t num_sequences);

}  // namespace pathattn
