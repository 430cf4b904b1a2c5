// The flip-flop language of Liu et al. 2023, "Exposing Attention Glitches with Flip-Flop Language Modeling" (arXiv 2306.00946), section 3.
//
// A sequence of T tokens is T/2 pairs (instruction, bit): write (w) stores its bit, read (r) is followed by the bit last written, ignore (i) by a bit
// that means nothing. The first instruction is w, the last r; those between are i with probability p_ignore and w or r with (1 - p_ignore) / 2 each.
// Bits after w and i are uniform. Only bits after r can be told from what came before: they alone have a target, at the position of their r.
#pragma once

#include "data/stream.h"

namespace pathattn {

// The token ids of the published data sets (huggingface.co/datasets/synthseq/flipflop).
enum FlipFlopToken : int64_t { kWrite = 0, kRead = 1, kIgnore = 2, kZero = 3, kOne = 4 };
constexpr int64_t kNumFlipFlopTokens = 5;

struct FlipFlop {
  double p_ignore = 0.8;
  int64_t tokens = 512;  // of a sequence; even, at least 4

  // The sequences first, first + 1, ... of the random stream, [count, tokens]: each is a function of its number, so any part can be made anywhere.
  Batch sequences(uint64_t seed, uint64_t stream, int64_t first, int64_t count) const;
};

// Random streams of one seed: training, validation and test never share a sequence.
enum FlipFlopStream : uint64_t { kFlipFlopTraining = 0, kFlipFlopValidation = 1, kFlipFlopTest = 2 };

// The paper's test sets; the number of sequences gives each about 10,000 reads.
struct FlipFlopTestSet {
  const char* name;
  FlipFlop language;
  int64_t num_sequences;
};
constexpr FlipFlopTestSet kFlipFlopTestSets[] = {{"in_distribution", {0.8, 512}, 400}, {"sparse", {0.98, 512}, 3000}, {"dense", {0.1, 512}, 100}};

std::unique_ptr<Stream> make_flip_flop_stream(const FlipFlop& language, int64_t batch_size, uint64_t seed);

}  // namespace pathattn
