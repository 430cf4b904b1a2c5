// Word problems over finite groups: Merrill, Petty and Sabharwal 2024, "The Illusion of State in State-Space Models" (arXiv 2404.08819), section 5.
//
// A word x_1 x_2 ... x_L of group elements, each drawn uniformly; the target at x_t is the state x_1 · x_2 ⋯ x_t after it. A5 and S5 are not
// solvable: their word problems are complete for NC1; Z60, as large as A5, is there for contrast.
//
// A row is `prefix` constant tokens, all different and without targets, then the word. Keys that stand before the word carry nothing but state.
#pragma once

#include "base/recipe.h"
#include "data/finite_group.h"
#include "data/synthetic_task.h"

namespace pathattn {

struct WordProblemSettings {
  std::string group = "a5";
  int64_t prefix = 0;
  int64_t curriculum_start = 0;  // length of the first words; 0: no curriculum
  double curriculum_threshold = 0.93;
};

// Tokens 0 ... order - 1 are the elements, those above the prefix.
class WordProblem : public SyntheticTask {
 public:
  WordProblem(const WordProblemSettings& settings, int64_t tokens);  // of a row: prefix and word
  static WordProblem read(Recipe& recipe, int64_t tokens);

  const FiniteGroup& group() const { return group_; }
  int64_t prefix() const { return settings_.prefix; }

  int64_t vocabulary_size() const override { return group_.order() + settings_.prefix; }
  nlohmann::json identity() const override;
  std::optional<Curriculum> curriculum() const override;

 private:
  void write(Random random, std::span<int64_t> tokens, std::span<int64_t> targets) const override;

  WordProblemSettings settings_;
  FiniteGroup group_;
};

}  // namespace pathattn
