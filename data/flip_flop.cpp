#include "data/flip_flop.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "base/random.h"

namespace pathattn {
namespace {

// tokens[0 .. num_tokens) and, at each read, the bit that follows as its target; the other targets are left as they are.
void write_sequence(double p_ignore, int64_t num_tokens, Random random, int64_t* tokens, int64_t* targets) {
  int64_t stored = kZero;
  for (int64_t i = 0; i < num_tokens; i += 2) {
    const double choice = random.uniform();
    int64_t instruction = choice < p_ignore ? kIgnore : choice < p_ignore + (1 - p_ignore) / 2 ? kWrite : kRead;
    if (i == 0) instruction = kWrite;
    if (i == num_tokens - 2) instruction = kRead;
    int64_t bit = random.next() & 1 ? kOne : kZero;
    if (instruction == kWrite) stored = bit;
    if (instruction == kRead) targets[i] = bit = stored;
    tokens[i] = instruction;
    tokens[i + 1] = bit;
  }
}

class FlipFlopTrainingStream : public Stream {
 public:
  FlipFlopTrainingStream(const FlipFlop& language, int64_t batch_size, uint64_t seed)
      : Stream(
            {{"kind", "flip_flop"}, {"batch_size", batch_size}, {"tokens_per_row", language.tokens}, {"seed", seed}, {"p_ignore", language.p_ignore}},
            kNumFlipFlopTokens),
        language_(language),
        batch_size_(batch_size),
        seed_(seed) {}

 private:
  Batch batch(int64_t index) override { return language_.sequences(seed_, kFlipFlopTraining, index * batch_size_, batch_size_); }

  FlipFlop language_;
  int64_t batch_size_;
  uint64_t seed_;
};

}  // namespace

Batch FlipFlop::sequences(uint64_t seed, uint64_t stream, int64_t first, int64_t count) const {
  Batch batch{at::empty({count, tokens}, at::kLong), at::full({count, tokens}, kIgnoreTarget, at::kLong), {}};
  for (int64_t row = 0; row < count; ++row) {
    const Random random(seed, stream, static_cast<uint64_t>(first + row) * static_cast<uint64_t>(tokens));  // two draws a pair
    write_sequence(p_ignore, tokens, random, batch.tokens.data_ptr<int64_t>() + row * tokens, batch.targets.data_ptr<int64_t>() + row * tokens);
  }
  return batch;
}

std::unique_ptr<Stream> make_flip_flop_stream(const FlipFlop& language, int64_t batch_size, uint64_t seed) {
  return std::make_unique<FlipFlopTrainingStream>(language, batch_size, seed);
}

}  // namespace pathattn
