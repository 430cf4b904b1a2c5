// The synthetic tasks against their definitions, written out a second time, and what they have in common.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "base/error_of.h"
#include "data/flip_flop.h"
#include "data/mqrar.h"
#include "data/swap_identity.h"
#include "data/test_streams.h"
#include "data/word_problem.h"

namespace pathattn {
namespace {

using nlohmann::json;

std::vector<std::unique_ptr<SyntheticTask>> all_tasks() {
  std::vector<std::unique_ptr<SyntheticTask>> tasks;
  tasks.push_back(std::make_unique<FlipFlop>());
  for (const std::string& group : finite_group_names()) tasks.push_back(std::make_unique<WordProblem>(WordProblemSettings{group, 8}, 28));
  for (const int64_t n_back : {1, 4}) tasks.push_back(std::make_unique<Mqrar>(MqrarSettings{n_back}, 128));
  tasks.push_back(std::make_unique<SwapIdentity>(40));
  return tasks;
}

TEST(SyntheticTask, sequences_are_functions_of_seed_set_and_number) {
  for (const auto& task : all_tasks()) {
    const Batch whole = task->sequences(1, kTraining, 0, 10), part = task->sequences(1, kTraining, 4, 3);
    EXPECT_TRUE(at::equal(whole.tokens.narrow(0, 4, 3), part.tokens));
    EXPECT_TRUE(at::equal(whole.targets.narrow(0, 4, 3), part.targets));
    std::set<std::vector<int64_t>> seen;
    for (const uint64_t seed : {1, 2}) {
      for (const SequenceSet set : {kTraining, kValidation, kTest}) {
        const Batch batch = task->sequences(seed, set, 0, 200);
        for (int64_t row = 0; row < 200; ++row) seen.insert(values(batch.tokens[row]));
      }
    }
    EXPECT_EQ(seen.size(), 1200u) << task->identity();
  }
}

TEST(SyntheticTask, tokens_and_targets_lie_in_the_vocabulary) {
  for (const auto& task : all_tasks()) {
    const Batch batch = task->sequences(2, kTest, 0, 300);
    EXPECT_GE(batch.tokens.min().item<int64_t>(), 0);
    EXPECT_LT(batch.tokens.max().item<int64_t>(), task->vocabulary_size()) << task->identity();
    EXPECT_LT(batch.targets.max().item<int64_t>(), task->vocabulary_size()) << task->identity();
  }
}

TEST(FlipFlop, sequences_obey_the_definition) {
  for (const double p_ignore : {0.0, 0.1, 0.8, 0.98, 1.0}) {
    const int64_t rows = 300, tokens = 512;
    const Batch batch = FlipFlop(p_ignore, tokens).sequences(3, kTest, 0, rows);
    std::map<int64_t, int64_t> instructions, free_bits, read_bits;
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<int64_t> sequence = values(batch.tokens[row]), targets = values(batch.targets[row]);
      EXPECT_EQ(sequence.front(), kWrite);
      EXPECT_EQ(sequence[tokens - 2], kRead);
      int64_t written = -1;
      for (int64_t i = 0; i < tokens; i += 2) {
        const int64_t instruction = sequence[i], bit = sequence[i + 1];
        ASSERT_TRUE(bit == kZero || bit == kOne);
        ASSERT_TRUE(instruction == kWrite || instruction == kRead || instruction == kIgnore);
        if (instruction == kWrite) written = bit;
        if (instruction == kRead) {
          ASSERT_EQ(bit, written);
        }
        ASSERT_EQ(targets[i], instruction == kRead ? bit : kIgnoreTarget);
        ASSERT_EQ(targets[i + 1], kIgnoreTarget);
        if (i > 0 && i < tokens - 2) ++instructions[instruction];
        ++(instruction == kRead ? read_bits : free_bits)[bit];
      }
    }
    const auto expect_share = [](int64_t count, double share, int64_t total) {
      EXPECT_NEAR(count, share * total, 5 * std::sqrt(share * (1 - share) * total)) << share;
    };
    const int64_t total = rows * (tokens / 2 - 2);
    expect_share(instructions[kIgnore], p_ignore, total);
    expect_share(instructions[kWrite], (1 - p_ignore) / 2, total);
    expect_share(instructions[kRead], (1 - p_ignore) / 2, total);
    expect_share(free_bits[kOne], 0.5, free_bits[kOne] + free_bits[kZero]);
  }
}

TEST(FlipFlop, stream_resumes_exactly) {
  const auto make = [] { return make_task_stream(std::make_unique<FlipFlop>(0.8, 64), 3, 5); };
  for (const int64_t taken : {0, 1, 7}) expect_exact_continuation(make, taken, 8);
  EXPECT_EQ(make()->vocabulary_size(), kNumFlipFlopTokens);
  // Recorded once: a change would silently alter every saved run's data.
  EXPECT_EQ(values(make()->next().tokens[0].narrow(0, 0, 12)), (std::vector<int64_t>{0, 4, 2, 4, 0, 3, 2, 3, 2, 3, 0, 3}));
}

// The elements of a group of permutations in lexicographic order, found by trying all maps of five places.
std::vector<std::array<int64_t, 5>> permutations(bool only_even) {
  std::vector<std::array<int64_t, 5>> found;
  for (int64_t code = 0; code < 3125; ++code) {
    const std::array<int64_t, 5> map = {code / 625, code / 125 % 5, code / 25 % 5, code / 5 % 5, code % 5};
    double sign = 1;  // the product of (map[j] - map[i]) / (j - i): 1, -1, or 0 if two places go to one
    for (int64_t i = 0; i < 5; ++i) {
      for (int64_t j = i + 1; j < 5; ++j) sign *= static_cast<double>(map[j] - map[i]) / static_cast<double>(j - i);
    }
    if (sign > 0.5 || (sign < -0.5 && !only_even)) found.push_back(map);
  }
  return found;
}

TEST(FiniteGroup, tables_are_those_of_the_groups) {
  for (const char* name : {"a5", "s5"}) {
    const FiniteGroup group(name);
    const auto elements = permutations(name == std::string("a5"));
    ASSERT_EQ(group.order(), static_cast<int64_t>(elements.size()));
    for (int64_t x = 0; x < group.order(); ++x) {
      for (int64_t y = 0; y < group.order(); ++y) {
        for (size_t i = 0; i < 5; ++i) ASSERT_EQ(elements[group.product(x, y)][i], elements[y][elements[x][i]]);
      }
    }
  }
  const FiniteGroup cyclic("z60");
  EXPECT_EQ(cyclic.order(), 60);
  for (int64_t x = 0; x < 60; ++x) {
    for (int64_t y = 0; y < 60; ++y) ASSERT_EQ(cyclic.product(x, y), (x + y) % 60);
  }
  EXPECT_EQ(FiniteGroup("a5").order(), 60);
  EXPECT_EQ(FiniteGroup("s5").order(), 120);
  EXPECT_NE(error_of([] { FiniteGroup("a6"); }).find("a5, s5 and z60"), std::string::npos);
}

TEST(WordProblem, targets_are_the_states_after_each_prefix) {
  for (const std::string& name : finite_group_names()) {
    const int64_t prefix = 3, length = 20, rows = 400;
    const WordProblem problem({name, prefix}, prefix + length);
    const FiniteGroup group(name);
    EXPECT_EQ(problem.vocabulary_size(), group.order() + prefix);
    const Batch batch = problem.sequences(1, kTest, 0, rows);
    std::map<int64_t, int64_t> elements;
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<int64_t> tokens = values(batch.tokens[row]), targets = values(batch.targets[row]);
      for (int64_t i = 0; i < prefix; ++i) {
        ASSERT_EQ(tokens[i], group.order() + i);
        ASSERT_EQ(targets[i], kIgnoreTarget);
      }
      int64_t state = 0;
      for (int64_t i = prefix; i < prefix + length; ++i) {
        state = group.product(state, tokens[i]);
        ASSERT_EQ(targets[i], state);
        ++elements[tokens[i]];
      }
    }
    const double share = 1.0 / static_cast<double>(group.order()), total = rows * length;
    EXPECT_EQ(static_cast<int64_t>(elements.size()), group.order());
    for (const auto& [element, count] : elements) EXPECT_NEAR(count, share * total, 6 * std::sqrt(share * total)) << element;
  }
}

TEST(WordProblem, curriculum_lengthens_words_once_their_end_is_mastered) {
  const auto stream = make_task_stream(std::make_unique<WordProblem>(WordProblemSettings{"a5", 8, 2, 0.93}, 12), 5, 1);
  const WordProblem problem({"a5", 8}, 12);
  const std::pair<double, int64_t> reports[] = {{0.5, 10}, {0.93, 10}, {0.94, 11}, {0.2, 11}, {1, 12}, {1, 12}};  // accuracy, tokens after it
  EXPECT_EQ(stream->next().tokens.size(1), 10);
  int64_t first = 5;
  for (const auto& [accuracy, tokens] : reports) {
    stream->report_accuracy(accuracy);
    EXPECT_TRUE(same(stream->next(), problem.sequences(1, kTraining, first, 5, tokens)));
    first += 5;
  }
  const auto without = make_task_stream(std::make_unique<WordProblem>(WordProblemSettings{"a5", 8}, 12), 5, 1);
  without->report_accuracy(1);
  EXPECT_EQ(without->next().tokens.size(1), 12);
}

TEST(WordProblem, curriculum_goes_on_at_the_length_it_had_reached) {
  const auto make = [](int64_t start, int64_t tokens) {
    return make_task_stream(std::make_unique<WordProblem>(WordProblemSettings{"a5", 8, start, 0.93}, tokens), 5, 1);
  };
  const auto stream = make(2, 20);
  for (int i = 0; i < 3; ++i) {
    stream->next();
    stream->report_accuracy(1);
  }
  const json position = stream->position();
  const auto resumed = make(2, 20);
  for (int i = 0; i < 7; ++i) resumed->report_accuracy(1);
  resumed->seek(position);
  EXPECT_EQ(resumed->position(), position);
  const Batch batch = resumed->next();
  EXPECT_EQ(batch.tokens.size(1), 13);
  EXPECT_TRUE(same(batch, stream->next()));

  json damaged = position;
  damaged.erase("curriculum_tokens");
  EXPECT_NE(error_of([&] { resumed->seek(damaged); }).find("length that the curriculum had reached"), std::string::npos);
  EXPECT_NE(error_of([&] { make(3, 20)->seek(position); }).find("curriculum_start was 2 and is 3"), std::string::npos);
  const auto changed = make(3, 12);  // as long as this one allows
  changed->seek(position, /*allow_changes=*/true);
  EXPECT_EQ(changed->next().tokens.size(1), 12);
}

TEST(Mqrar, targets_are_the_values_of_n_occurrences_ago) {
  for (const int64_t n_back : {1, 2, 3, 4}) {
    const MqrarSettings settings = {.n_back = n_back, .num_keys = 6, .num_values = 9};
    const Batch batch = Mqrar(settings, 128).sequences(1, kTest, 0, 100);
    std::map<int64_t, int64_t> counts;
    for (int64_t row = 0; row < 100; ++row) {
      const std::vector<int64_t> tokens = values(batch.tokens[row]), targets = values(batch.targets[row]);
      for (int64_t i = 0; i < 128; i += 2) {
        ASSERT_LT(tokens[i], 6);
        ASSERT_TRUE(6 <= tokens[i + 1] && tokens[i + 1] < 15);
        int64_t expected = kIgnoreTarget, occurrences = 0;
        for (int64_t j = i - 2; j >= 0; j -= 2) {
          if (tokens[j] == tokens[i] && ++occurrences == n_back) expected = tokens[j + 1];
        }
        ASSERT_EQ(targets[i], expected);
        ASSERT_EQ(targets[i + 1], kIgnoreTarget);
        ++counts[tokens[i]];
        ++counts[tokens[i + 1]];
      }
    }
    for (const auto& [token, count] : counts) {
      const double expected = 6400.0 / (token < 6 ? 6 : 9);
      EXPECT_NEAR(count, expected, 6 * std::sqrt(expected)) << token;
    }
    EXPECT_EQ(counts.size(), 15u);
  }
}

TEST(SwapIdentity, targets_say_whether_the_product_is_the_identity) {
  const int64_t rows = 200, tokens = 64;
  const Batch batch = SwapIdentity(tokens).sequences(1, kTest, 0, rows);
  int64_t num_same = 0;
  std::map<int64_t, int64_t> swaps;
  for (int64_t row = 0; row < rows; ++row) {
    const std::vector<int64_t> sequence = values(batch.tokens[row]), targets = values(batch.targets[row]);
    ASSERT_EQ(sequence[0], kBegin);
    std::array<int64_t, 5> elements;
    std::iota(elements.begin(), elements.end(), 0);
    const std::array<int64_t, 5> start = elements;
    for (int64_t i = 0; i < tokens; ++i) {
      if (i > 0) {
        const auto& [a, b] = kSwaps.at(sequence[i] - kFirstSwap);
        std::swap(elements[a], elements[b]);
        ++swaps[sequence[i]];
      }
      ASSERT_EQ(targets[i], elements == start ? kSame : kMoved);
      num_same += elements == start;
    }
  }
  EXPECT_EQ(swaps.size(), kSwaps.size());
  EXPECT_GT(num_same, rows * tokens / 20);
  EXPECT_LT(num_same, rows * tokens / 2);
}

TEST(SyntheticTask, streams_resume_exactly) {
  const auto makers = std::vector<std::function<std::unique_ptr<SyntheticTask>()>>{
      [] {
        return std::make_unique<WordProblem>(WordProblemSettings{"s5", 8}, 28);
      },
      [] { return std::make_unique<Mqrar>(MqrarSettings{2}, 64); },
      [] { return std::make_unique<SwapIdentity>(32); },
  };
  for (const auto& make : makers) {
    for (const int64_t taken : {0, 1, 7}) expect_exact_continuation([&] { return make_task_stream(make(), 3, 5); }, taken, 8);
  }
}

// Recorded once: a change would silently alter every saved run's data.
TEST(SyntheticTask, first_tokens_are_those_recorded) {
  const auto first = [](const SyntheticTask& task) { return values(task.sequences(5, kTraining, 0, 1).tokens[0].narrow(0, 0, 10)); };
  EXPECT_EQ(first(WordProblem({"a5", 2}, 12)), (std::vector<int64_t>{60, 61, 52, 53, 0, 19, 51, 51, 23, 45}));
  EXPECT_EQ(first(WordProblem({"s5", 2}, 12)), (std::vector<int64_t>{120, 121, 104, 106, 0, 38, 102, 102, 46, 90}));
  EXPECT_EQ(first(WordProblem({"z60", 2}, 12)), (std::vector<int64_t>{60, 61, 52, 53, 0, 19, 51, 51, 23, 45}));
  EXPECT_EQ(first(Mqrar({}, 768)), (std::vector<int64_t>{27, 60, 0, 42, 27, 59, 12, 56, 13, 37}));
  EXPECT_EQ(first(SwapIdentity(512)), (std::vector<int64_t>{0, 8, 8, 1, 7, 4, 7, 8, 8, 9}));
}

}  // namespace
}  // namespace pathattn
