#include "data/word_problem.h"

#include "base/error.h"

namespace pathattn {

WordProblem::WordProblem(const WordProblemSettings& settings, int64_t tokens) : SyntheticTask(tokens), settings_(settings), group_(settings.group) {}

WordProblem WordProblem::read(Recipe& recipe, int64_t tokens) {
  WordProblemSettings settings;
  settings.group = recipe.choice("data.group", settings.group, finite_group_names());
  settings.prefix = recipe.integer("data.prefix", settings.prefix, 0, 1 << 10);
  settings.curriculum_start = recipe.integer("data.curriculum_start", settings.curriculum_start, 0, 1 << 24);
  settings.curriculum_threshold = recipe.number("data.curriculum_threshold", settings.curriculum_threshold, 0, 1);
  const int64_t length = tokens - settings.prefix;
  if (length < 1) {
    fail("{}: a row of {} tokens leaves no room for a word after data.prefix = {}: raise train.tokens", recipe.name(), tokens, settings.prefix);
  }
  if (settings.curriculum_start > length) {
    fail("{}: data.curriculum_start = {} is above {}, the longest word (train.tokens = {} less data.prefix = {})", recipe.name(),
         settings.curriculum_start, length, tokens, settings.prefix);
  }
  return WordProblem(settings, tokens);
}

nlohmann::json WordProblem::identity() const {
  return {{"kind", "word_problem"},
          {"group", settings_.group},
          {"prefix", settings_.prefix},
          {"curriculum_start", settings_.curriculum_start},
          {"curriculum_threshold", settings_.curriculum_threshold}};
}

std::optional<Curriculum> WordProblem::curriculum() const {
  if (settings_.curriculum_start == 0) return {};
  return Curriculum{
      .first_tokens = settings_.prefix + settings_.curriculum_start, .last_tokens = tokens(), .threshold = settings_.curriculum_threshold};
}

void WordProblem::write(Random random, std::span<int64_t> tokens, std::span<int64_t> targets) const {
  const auto prefix = static_cast<size_t>(settings_.prefix);
  for (size_t i = 0; i < prefix; ++i) tokens[i] = group_.order() + static_cast<int64_t>(i);
  int64_t state = 0;
  for (size_t i = prefix; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int64_t>(random.below(static_cast<uint64_t>(group_.order())));
    targets[i] = state = group_.product(state, tokens[i]);
  }
}

}  // namespace pathattn
