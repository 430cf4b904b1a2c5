// Tasks whose sequences are made on the fly: each is a function of (seed, set, its number), so that nothing is stored and any part of a data
// set can be made anywhere.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "base/random.h"
#include "data/stream.h"

namespace pathattn {

// Random streams of one seed (base/random.h), which share no sequence.
enum SequenceSet : uint64_t { kTraining = 0, kValidation = 1, kTest = 2 };

class SyntheticTask {
 public:
  virtual ~SyntheticTask() = default;

  virtual int64_t vocabulary_size() const = 0;
  virtual nlohmann::json identity() const = 0;  // "kind" and the fields that decide what a sequence is, but for the tokens
  virtual std::optional<Curriculum> curriculum() const { return {}; }
  int64_t tokens() const { return tokens_; }  // of a sequence

  // The sequences first, first + 1, ... of a set, [count, num_tokens]. num_tokens: below tokens() in a curriculum alone.
  Batch sequences(uint64_t seed, SequenceSet set, int64_t first, int64_t count, int64_t num_tokens) const;
  Batch sequences(uint64_t seed, SequenceSet set, int64_t first, int64_t count) const { return sequences(seed, set, first, count, tokens_); }

 protected:
  explicit SyntheticTask(int64_t tokens) : tokens_(tokens) {}

 private:
  // One sequence. `targets` comes filled with kIgnoreTarget. Makes one draw a token (`below` hardly ever more), so that sequences
  // do not share draws.
  virtual void write(Random random, std::span<int64_t> tokens, std::span<int64_t> targets) const = 0;

  int64_t tokens_;
};

std::unique_ptr<Stream> make_task_stream(std::unique_ptr<const SyntheticTask> task, int64_t batch_size, uint64_t seed);

}  // namespace pathattn
