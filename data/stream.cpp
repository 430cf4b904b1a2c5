#include "data/stream.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "data/flip_flop.h"
#include "data/mqrar.h"
#include "data/swap_identity.h"
#include "data/text_windows.h"
#include "data/word_problem.h"

namespace pathattn {
namespace {

using nlohmann::json;

// Null if the data are text.
std::unique_ptr<SyntheticTask> read_task(Recipe& recipe, int64_t tokens) {
  const std::string kind = read_data_kind(recipe);
  if (kind == "flip_flop") return std::make_unique<FlipFlop>(FlipFlop::read(recipe, tokens));
  if (kind == "word_problem") return std::make_unique<WordProblem>(WordProblem::read(recipe, tokens));
  if (kind == "mqrar") return std::make_unique<Mqrar>(Mqrar::read(recipe, tokens));
  if (kind == "swap_identity") return std::make_unique<SwapIdentity>(tokens);
  return nullptr;
}

std::string text_of(const json& value) { return value.is_null() ? "not there" : value.dump(); }

}  // namespace

std::string read_data_kind(Recipe& recipe) {
  return recipe.choice("data.kind", "text", {"text", "flip_flop", "word_problem", "mqrar", "swap_identity"});
}

bool Stream::report_accuracy(double last_accuracy) {
  if (is_fully_grown() || last_accuracy <= curriculum_->threshold) return false;
  ++curriculum_tokens_;
  return true;
}

json Stream::position() const {
  json position = {{"batches", num_batches_}, {"data", identity_}};
  if (curriculum_) position["curriculum_tokens"] = curriculum_tokens_;
  return position;
}

void Stream::seek(const json& position, bool allow_changes) {
  const auto has_count = [&](const char* name) {
    return position.contains(name) && position[name].is_number_integer() && position[name].get<int64_t>() >= 0;
  };
  const bool whole = position.is_object() && position.contains("data") && position["data"].is_object() && has_count("batches");
  if (!whole) fail("the saved position in the data is damaged: it lacks a count of batches and what the data were");
  const json& then = position["data"];
  std::set<std::string> fields;
  for (const json& identity : {then, identity_}) {
    for (const auto& [field, value] : identity.items()) fields.insert(field);
  }
  std::string differences;
  for (const std::string& field : fields) {
    const json before = then.value(field, json()), now = identity_.value(field, json());
    if (before != now) differences += fmt::format("{}{} was {} and is {}", differences.empty() ? "" : ", ", field, text_of(before), text_of(now));
  }
  if (!differences.empty() && !allow_changes) fail("the data are not those of the saved position: {}", differences);
  if (curriculum_ && has_count("curriculum_tokens")) {
    curriculum_tokens_ = std::clamp(position["curriculum_tokens"].get<int64_t>(), curriculum_->first_tokens, curriculum_->last_tokens);
  } else if (curriculum_ && differences.empty()) {
    fail("the saved position in the data is damaged: it lacks the length that the curriculum had reached");
  }
  num_batches_ = position["batches"].get<int64_t>();
}

std::unique_ptr<Stream> make_training_stream(Recipe& recipe, int64_t batch_size, int64_t tokens_per_row, uint64_t seed) {
  if (auto task = read_task(recipe, tokens_per_row)) return make_task_stream(std::move(task), batch_size, seed);
  return make_text_stream(read_text(recipe).training, batch_size, tokens_per_row, seed);
}

std::vector<Batch> make_validation_batches(Recipe& recipe, int64_t batch_size, int64_t tokens_per_row, int64_t num_batches) {
  std::vector<Batch> batches;
  if (const auto task = read_task(recipe, tokens_per_row)) {
    for (int64_t i = 0; i < num_batches; ++i) batches.push_back(task->sequences(0, kValidation, i * batch_size, batch_size));
    return batches;
  }
  const Batch windows = validation_windows(read_text(recipe).validation, batch_size * num_batches, tokens_per_row);
  for (int64_t row = 0; row < windows.tokens.size(0); row += batch_size) {
    const int64_t rows = std::min(batch_size, windows.tokens.size(0) - row);
    batches.push_back({windows.tokens.narrow(0, row, rows), windows.targets.narrow(0, row, rows), {}});
  }
  return batches;
}

}  // namespace pathattn
