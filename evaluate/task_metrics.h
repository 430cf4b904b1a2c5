// How well a model does a synthetic task: one function for each kind of data/, on test sequences that training never sees. Shares are in %, and an
// error where nothing is counted.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "data/flip_flop.h"
#include "data/mqrar.h"
#include "data/swap_identity.h"
#include "data/word_problem.h"
#include "model/language_model.h"

namespace pathattn {

struct ErrorCount {
  int64_t wrong = 0, counted = 0;
  double percent() const { return 100.0 * static_cast<double>(wrong) / static_cast<double>(counted); }  // of what was counted
};

// Counted targets of `batch`, and those that are not the model's likeliest token.
ErrorCount count_errors(const LanguageModel& model, const Batch& batch);

// num_sequences: of test sequences (flip-flop: of each set); 0: the task's own number.

// {"in_distribution": error at the bits after reads, "sparse": ..., "dense": ..., "reads": {"in_distribution": counted reads, ...}}
// The sets' sequences are as long as `language`'s; without num_sequences each set has at least test_reads reads.
nlohmann::ordered_json evaluate_flip_flop(const LanguageModel& model, const FlipFlop& language, int64_t test_reads, int64_t num_sequences);

// {"words": num_sequences, "accuracy": {"1": share of words whose state after one element is right, "2": ..., up to the longest word}}
nlohmann::ordered_json evaluate_word_problem(const LanguageModel& model, const WordProblem& problem, int64_t num_sequences);

// {"accuracy": share of the recalls that are right, "recalls": keys with a target}
nlohmann::ordered_json evaluate_mqrar(const LanguageModel& model, const Mqrar& task, int64_t num_sequences);

// {"accuracy": {"same": share of the products equal to the identity that are told so, "moved": of the others}, "products": {"same": counted, ...}}
nlohmann::ordered_json evaluate_swap_identity(const LanguageModel& model, const SwapIdentity& task, int64_t num_sequences);

// "task": the kind in `recipe`'s [data], which must not be text, and the results of the function above for it.
nlohmann::ordered_json evaluate_task(const LanguageModel& model, Recipe& recipe, int64_t tokens_per_row, int64_t num_sequences);

}  // namespace pathattn
