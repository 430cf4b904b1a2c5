#include "data/stream.h"

#include <set>

#include "base/error.h"
#include "data/flip_flop.h"
#include "data/text_windows.h"

namespace pathattn {
namespace {

using nlohmann::json;

const std::vector<std::string> kKinds = {"text", "flip_flop"};

FlipFlop read_flip_flop(Recipe& recipe, int64_t tokens) {
  if (tokens % 2 != 0 || tokens < 4)
    fail("{}: the flip-flop language is pairs of tokens, so a row must be an even number of at least 4, not {}", recipe.name(), tokens);
  return {recipe.number("data.p_ignore", FlipFlop{}.p_ignore, 0, 1), tokens};
}

std::string text_of(const json& value) { return value.is_null() ? "not there" : value.dump(); }

}  // namespace

json Stream::position() const { return {{"batches", num_batches_}, {"data", identity_}}; }

void Stream::seek(const json& position, bool allow_changes) {
  const bool whole = position.is_object() && position.contains("data") && position["data"].is_object() && position.contains("batches") &&
                     position["batches"].is_number_integer() && position["batches"].get<int64_t>() >= 0;
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
  num_batches_ = position["batches"].get<int64_t>();
}

std::unique_ptr<Stream> make_training_stream(Recipe& recipe, int64_t batch_size, int64_t tokens_per_row, uint64_t seed) {
  if (recipe.choice("data.kind", kKinds.front(), kKinds) == "flip_flop") {
    return make_flip_flop_stream(read_flip_flop(recipe, tokens_per_row), batch_size, seed);
  }
  return make_text_stream(read_text(recipe).training, batch_size, tokens_per_row, seed);
}

std::vector<Batch> make_validation_batches(Recipe& recipe, int64_t batch_size, int64_t tokens_per_row, int64_t num_batches) {
  std::vector<Batch> batches;
  if (recipe.choice("data.kind", kKinds.front(), kKinds) == "flip_flop") {
    const FlipFlop language = read_flip_flop(recipe, tokens_per_row);
    for (int64_t i = 0; i < num_batches; ++i) batches.push_back(language.sequences(0, kFlipFlopValidation, i * batch_size, batch_size));
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
