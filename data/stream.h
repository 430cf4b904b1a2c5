// Batches of tokens for training: what a recipe's section [data] names. docs/data.md lists its fields.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/recipe.h"

namespace pathattn {

constexpr int64_t kIgnoreTarget = -100;  // the target of a position that has no loss

struct Batch {
  at::Tensor tokens;      // [B, T] int64
  at::Tensor targets;     // [B, T] int64: the token to predict at each position (in text: the one that follows), or kIgnoreTarget
  at::Tensor cu_seqlens;  // undefined: each row is one document
};

// Rows that grow by one token once their end is mastered.
struct Curriculum {
  int64_t first_tokens, last_tokens;  // of a row, at the start and at most
  double threshold;                   // share of a batch's rows whose last target must be right
};

// An endless sequence of batches of which the n-th is a function of n (and, in a curriculum, of how long rows are by then), so that the count of
// batches taken (and that length) is the whole position.
class Stream {
 public:
  virtual ~Stream() = default;

  Batch next() { return batch(num_batches_++); }
  int64_t vocabulary_size() const { return vocabulary_size_; }

  bool has_curriculum() const { return curriculum_.has_value(); }
  // For the curriculum: the share of the newest batch's rows whose last target the model had right before it learned from them. Whether rows grow.
  bool report_accuracy(double last_accuracy);
  bool is_fully_grown() const { return !curriculum_ || curriculum_tokens_ == curriculum_->last_tokens; }

  nlohmann::json position() const;  // small; goes into checkpoints
  // Goes on where `position` was taken. Error naming what differs if that was with other data, batch size, row length or seed, unless
  // allow_changes: then the count of batches (and the rows' length, as far as this curriculum has it) alone is taken over.
  void seek(const nlohmann::json& position, bool allow_changes = false);

 protected:
  // identity: all that the sequence depends on, as named scalars; what a user sees when seek refuses.
  Stream(nlohmann::json identity, int64_t vocabulary_size, std::optional<Curriculum> curriculum = {})
      : identity_(std::move(identity)), vocabulary_size_(vocabulary_size), curriculum_(curriculum) {
    if (curriculum) curriculum_tokens_ = curriculum->first_tokens;
  }
  int64_t curriculum_tokens() const { return curriculum_tokens_; }  // of a row now; 0 without a curriculum

 private:
  virtual Batch batch(int64_t index) = 0;

  nlohmann::json identity_;
  int64_t vocabulary_size_;
  int64_t num_batches_ = 0;
  std::optional<Curriculum> curriculum_;
  int64_t curriculum_tokens_ = 0;
};

// "text" or the kind of a synthetic task: [data] kind.
std::string read_data_kind(Recipe& recipe);

// Reads [data]: `kind` and the fields of that kind. The seed orders the data; which text is for validation does not depend on it.
std::unique_ptr<Stream> make_training_stream(Recipe& recipe, int64_t batch_size, int64_t tokens_per_row, uint64_t seed);

// num_batches batches that training does not see (text: fewer if there is less validation text), the same for every training seed. The last may have
// fewer rows. Error if no text is set aside for validation.
std::vector<Batch> make_validation_batches(Recipe& recipe, int64_t batch_size, int64_t tokens_per_row, int64_t num_batches);

}  // namespace pathattn
