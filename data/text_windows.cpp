#include "data/text_windows.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "base/random.h"

namespace pathattn {
namespace {

enum RandomStream : uint64_t { kChosenWindows = 0, kFirstEpoch = 1 };

Batch cut_windows(std::string_view bytes, const std::vector<int64_t>& starts, int64_t tokens) {
  const auto rows = static_cast<int64_t>(starts.size());
  Batch batch{at::empty({rows, tokens}, at::kLong), at::empty({rows, tokens}, at::kLong), {}};
  for (int64_t row = 0; row < rows; ++row) {
    const auto* window = reinterpret_cast<const unsigned char*>(bytes.data()) + starts[row];
    std::copy_n(window, tokens, batch.tokens.data_ptr<int64_t>() + row * tokens);
    std::copy_n(window + 1, tokens, batch.targets.data_ptr<int64_t>() + row * tokens);
  }
  return batch;
}

void shuffle(std::vector<int64_t>& values, Random random) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random.below(i)]);
}

// At most `count` of the starts, spread evenly at random, in rising order.
std::vector<int64_t> choose(std::vector<int64_t> starts, int64_t count) {
  shuffle(starts, Random(0, kChosenWindows));
  starts.resize(std::min(starts.size(), static_cast<size_t>(count)));
  std::sort(starts.begin(), starts.end());
  return starts;
}

// Where the windows of `size` bytes start, of which the first is byte `first` of the corpus.
void append_starts(int64_t first, int64_t size, int64_t tokens, std::vector<int64_t>& starts) {
  for (int64_t start = 0; start + tokens < size; start += tokens) starts.push_back(first + start);
}

class TextStream : public Stream {
 public:
  TextStream(Corpus corpus, nlohmann::json identity, int64_t batch_size, int64_t tokens, uint64_t seed)
      : Stream(std::move(identity), kNumByteTokens), corpus_(std::move(corpus)), batch_size_(batch_size), tokens_(tokens), seed_(seed) {}

 private:
  Batch batch(int64_t index) override {
    const int64_t num_windows = (static_cast<int64_t>(corpus_.bytes().size()) - 1) / tokens_, batches_per_epoch = num_windows / batch_size_;
    if (const int64_t epoch = index / batches_per_epoch; epoch != epoch_) {
      order_.clear();
      append_starts(0, static_cast<int64_t>(corpus_.bytes().size()), tokens_, order_);
      shuffle(order_, Random(seed_, kFirstEpoch + static_cast<uint64_t>(epoch)));
      epoch_ = epoch;
    }
    const auto first = order_.begin() + index % batches_per_epoch * batch_size_;
    return cut_windows(corpus_.bytes(), {first, first + batch_size_}, tokens_);
  }

  Corpus corpus_;
  int64_t batch_size_, tokens_;
  uint64_t seed_;
  int64_t epoch_ = -1;
  std::vector<int64_t> order_;  // window starts in the order of epoch_
};

}  // namespace

SplitCorpus read_text(Recipe& recipe) {
  CorpusSource source;
  source.files = recipe.strings("data.files", {});
  source.extensions = recipe.strings("data.extensions", {});
  source.validation_fraction = recipe.number("data.validation_fraction", source.validation_fraction, 0, 0.5);
  source.split_seed = static_cast<uint64_t>(recipe.integer("data.split_seed", 0, 0, INT64_MAX));
  if (source.files.empty()) fail("{}: data.files is missing: name the files, folders or patterns to read text from", recipe.name());
  try {
    return read_corpus(source);
  } catch (const Error& error) {
    fail("{}: data.files: {}", recipe.name(), error.what());
  }
}

std::unique_ptr<Stream> make_text_stream(Corpus corpus, int64_t batch_size, int64_t tokens_per_row, uint64_t seed) {
  const auto size = static_cast<int64_t>(corpus.bytes().size());
  if ((size - 1) / tokens_per_row < batch_size) {
    fail("the training text has {} bytes, but one batch of {} windows of {} tokens needs {}: give more text, or a smaller batch or window", size,
         batch_size, tokens_per_row, batch_size * tokens_per_row + 1);
  }
  nlohmann::json identity = {{"kind", "text"},
                             {"batch_size", batch_size},
                             {"tokens_per_row", tokens_per_row},
                             {"seed", seed},
                             {"bytes", size},
                             {"documents", corpus.num_documents()},
                             {"hash", fmt::format("{:016x}", corpus.hash())}};
  return std::make_unique<TextStream>(std::move(corpus), std::move(identity), batch_size, tokens_per_row, seed);
}

Batch validation_windows(const Corpus& corpus, int64_t num_windows, int64_t tokens_per_row) {
  std::vector<int64_t> starts;
  append_starts(0, static_cast<int64_t>(corpus.bytes().size()), tokens_per_row, starts);
  if (starts.empty()) {
    fail("the validation text has {} bytes, but a window of {} tokens needs {}: give more files, or a larger data.validation_fraction",
         corpus.bytes().size(), tokens_per_row, tokens_per_row + 1);
  }
  return cut_windows(corpus.bytes(), choose(std::move(starts), num_windows), tokens_per_row);
}

Batch evaluation_windows(const Corpus& corpus, int64_t num_windows, int64_t tokens_per_row) {
  std::vector<int64_t> starts;
  int64_t first = 0, longest = 0;
  for (int64_t i = 0; i < corpus.num_documents(); ++i) {
    const auto size = static_cast<int64_t>(corpus.document(i).size());
    append_starts(first, size, tokens_per_row, starts);
    first += size;
    longest = std::max(longest, size);
  }
  if (starts.empty()) {
    fail("the longest validation file has {} bytes, but a window of {} tokens needs {}: give longer files, or ask for shorter windows", longest,
         tokens_per_row, tokens_per_row + 1);
  }
  return cut_windows(corpus.bytes(), choose(std::move(starts), num_windows), tokens_per_row);
}

}  // namespace pathattn
