#include "data/synthetic_task.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

namespace pathattn {
namespace {

nlohmann::json stream_identity(const SyntheticTask& task, int64_t batch_size, uint64_t seed) {
  nlohmann::json identity = task.identity();
  identity.update({{"batch_size", batch_size}, {"tokens_per_row", task.tokens()}, {"seed", seed}});
  return identity;
}

class TrainingStream : public Stream {
 public:
  TrainingStream(std::unique_ptr<const SyntheticTask> task, int64_t batch_size, uint64_t seed)
      : Stream(stream_identity(*task, batch_size, seed), task->vocabulary_size(), task->curriculum()),
        task_(std::move(task)),
        batch_size_(batch_size),
        seed_(seed) {}

 private:
  Batch batch(int64_t index) override {
    const int64_t num_tokens = has_curriculum() ? curriculum_tokens() : task_->tokens();
    return task_->sequences(seed_, kTraining, index * batch_size_, batch_size_, num_tokens);
  }

  std::unique_ptr<const SyntheticTask> task_;
  int64_t batch_size_;
  uint64_t seed_;
};

}  // namespace

Batch SyntheticTask::sequences(uint64_t seed, SequenceSet set, int64_t first, int64_t count, int64_t num_tokens) const {
  Batch batch{at::empty({count, num_tokens}, at::kLong), at::full({count, num_tokens}, kIgnoreTarget, at::kLong), {}};
  const auto length = static_cast<size_t>(num_tokens);
  for (int64_t row = 0; row < count; ++row) {
    const Random random(seed, set, static_cast<uint64_t>(first + row) * static_cast<uint64_t>(tokens_));
    write(random, {batch.tokens.data_ptr<int64_t>() + row * num_tokens, length}, {batch.targets.data_ptr<int64_t>() + row * num_tokens, length});
  }
  return batch;
}

std::unique_ptr<Stream> make_task_stream(std::unique_ptr<const SyntheticTask> task, int64_t batch_size, uint64_t seed) {
  return std::make_unique<TrainingStream>(std::move(task), batch_size, seed);
}

}  // namespace pathattn
