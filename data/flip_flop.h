// The flip-flop language of Liu et al. 2023, "Exposing Attention Glitches with Flip-Flop Language Modeling" (arXiv 2306.00946), section 3.
//
// A sequence of T tokens is T/2 pairs (instruction, bit): write (w) stores its bit, read (r) is followed by the bit last written, ignore (i) by a bit
// that means nothing. The first instruction is w, the last r; those between are i with probability p_ignore and w or r with (1 - p_ignore) / 2 each.
// Bits after w and i are uniform. Only bits after r can be told from what came before: they alone have a target, at the position of their r.
#pragma once

#include "base/recipe.h"
#include "data/synthetic_task.h"

namespace pathattn {

// The token ids of the published data sets (huggingface.co/datasets/synthseq/flipflop).
enum FlipFlopToken : int64_t { kWrite = 0, kRead = 1, kIgnore = 2, kZero = 3, kOne = 4 };
constexpr int64_t kNumFlipFlopTokens = 5;

class FlipFlop : public SyntheticTask {
 public:
  explicit FlipFlop(double p_ignore = 0.8, int64_t tokens = 512) : SyntheticTask(tokens), p_ignore_(p_ignore) {}  // tokens: even, at least 4
  static FlipFlop read(Recipe& recipe, int64_t tokens);

  int64_t vocabulary_size() const override { return kNumFlipFlopTokens; }
  nlohmann::json identity() const override { return {{"kind", "flip_flop"}, {"p_ignore", p_ignore_}}; }

 private:
  void write(Random random, std::span<int64_t> tokens, std::span<int64_t> targets) const override;

  double p_ignore_;
};

// How many reads each test set has at least: the field data.test_reads.
int64_t read_test_reads(Recipe& recipe);

// The paper's test sets.
struct FlipFlopTestSet {
  const char* name;
  double p_ignore;
};
constexpr FlipFlopTestSet kFlipFlopTestSets[] = {{"in_distribution", 0.8}, {"sparse", 0.98}, {"dense", 0.1}};

}  // namespace pathattn
