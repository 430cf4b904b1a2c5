// How well a model predicts text as a document grows, also far past the length of the rows that it was trained on.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "data/stream.h"
#include "model/language_model.h"

namespace pathattn {

// Bits a byte of the counted targets of `windows` [N, T], averaged over ranges of position. Position p is that of the token that predicts, with p
// tokens before it in the window. `edges` rise and end at most at T; each two neighbours a, b give a range a <= p < b:
// {"128-256": 1.7, "256-512": 1.8, ...}
nlohmann::ordered_json evaluate_bits_by_position(const LanguageModel& model, const Batch& windows, const std::vector<int64_t>& edges);

}  // namespace pathattn
