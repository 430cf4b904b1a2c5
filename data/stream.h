// Batches of tokens for training: what a recipe's section [data] names. docs/data.md lists its fields.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/recipe.h"

namespace pathattn {

constexpr int64_t kIgnoreTarget = -100;  // the target of a position that has no loss

struct Batch {
  at::Tensor tokens;      // [B, T] int64
  at::Tensor targets;     // [B, T] int64: the token that follows each position, or kIgnoreTarget
  at::Tensor cu_seqlens;  // undefined: each row is one document
};

// An endless sequence of batches of which the n-th is a function of n, so that the count of batches taken is the whole position.
class Stream {
 public:
  virtual ~Stream() = default;

  Batch next() { return batch(num_batches_++); }
  int64_t vocabulary_size() const { return vocabulary_size_; }

  nlohmann::json position() const;  // small; goes into checkpoints
  // Goes on where `position` was taken. Error naming what differs if that was with other data, batch size, row length or seed, unless
  // allow_changes: then the count of batches alone is taken over.
  void seek(const nlohmann::json& position, bool allow_changes = false);

 protected:
  // identity: all that the sequence depends on, as named scalars; what a user sees when seek refuses.
  Stream(nlohmann::json identity, int64_t vocabulary_size) : identity_(std::move(identity)), vocabulary_size_(vocabulary_size) {}

 private:
  virtual Batch batch(int64_t index) = 0;

  nlohmann::json identity_;
  int64_t vocabulary_size_;
  int64_t num_batches_ = 0;
};

// Reads [data]: `kind` and the fields of that kind. The seed orders the data; which text is for validation does not depend on it.
std::unique_ptr<Stream> make_training_stream(Recipe& recipe, int64_t batch_size, int64_t tokens_per_row, uint64_t seed);

// num_batches batches that training does not see (text: fewer if there is less validation text), the same for every training seed. The last may have
// fewer rows. Error if no text is set aside for validation.
std::vector<Batch> make_validation_batches(Recipe& recipe, int64_t batch_size, int64_t tokens_per_row, int64_t num_batches);

}  // namespace pathattn
