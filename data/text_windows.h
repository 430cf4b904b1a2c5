// Windows of bytes cut out of a corpus. A window of T tokens starting at byte s has the inputs s .. s+T-1 and the targets s+1 .. s+T.
#pragma once

#include "base/recipe.h"
#include "data/stream.h"
#include "text/corpus.h"

namespace pathattn {

constexpr int64_t kNumByteTokens = 256;  // token = byte

// The fields of [data] that say which text: files, extensions, validation_fraction, split_seed.
SplitCorpus read_text(Recipe& recipe);

// Training: the windows start at multiples of T in all documents one after the other, so neighbours share one token, and N tokens give
// floor((N - 1) / T) windows, the last of which may end with the last token. Each epoch takes them in another order, B a batch; fewer than B left
// over at its end are skipped. Error giving the size needed if there are fewer than B T + 1 tokens.
std::unique_ptr<Stream> make_text_stream(Corpus corpus, int64_t batch_size, int64_t tokens_per_row, uint64_t seed);

// Validation loss: at most num_windows of the windows that training would cut, always the same. Error giving the size needed if there is none.
Batch validation_windows(const Corpus& corpus, int64_t num_windows, int64_t tokens_per_row);

// Long contexts: at most num_windows windows that lie inside one document each and start at multiples of T there; always the same. Error giving the
// size needed if no document has T + 1 bytes.
Batch evaluation_windows(const Corpus& corpus, int64_t num_windows, int64_t tokens_per_row);

}  // namespace pathattn
