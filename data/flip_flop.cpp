#include "data/flip_flop.h"

#include "base/error.h"

namespace pathattn {

FlipFlop FlipFlop::read(Recipe& recipe, int64_t tokens) {
  if (tokens % 2 != 0 || tokens < 4)
    fail("{}: the flip-flop language is pairs of tokens, so a row must be an even number of at least 4, not {}", recipe.name(), tokens);
  read_test_reads(recipe);
  return FlipFlop(recipe.number("data.p_ignore", 0.8, 0, 1), tokens);
}

int64_t read_test_reads(Recipe& recipe) { return recipe.integer("data.test_reads", 10'000, 1, int64_t{1} << 32); }

void FlipFlop::write(Random random, std::span<int64_t> tokens, std::span<int64_t> targets) const {
  int64_t stored = kZero;
  for (size_t i = 0; i < tokens.size(); i += 2) {
    const double choice = random.uniform();
    int64_t instruction = choice < p_ignore_ ? kIgnore : choice < p_ignore_ + (1 - p_ignore_) / 2 ? kWrite : kRead;
    if (i == 0) instruction = kWrite;
    if (i == tokens.size() - 2) instruction = kRead;
    int64_t bit = random.next() & 1 ? kOne : kZero;
    if (instruction == kWrite) stored = bit;
    if (instruction == kRead) targets[i] = bit = stored;
    tokens[i] = instruction;
    tokens[i + 1] = bit;
  }
}

}  // namespace pathattn
