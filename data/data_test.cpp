#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/error_of.h"
#include "base/random.h"
#include "base/scratch_folder.h"
#include "data/flip_flop.h"
#include "data/stream.h"
#include "data/test_streams.h"
#include "data/text_windows.h"

namespace pathattn {
namespace {

using nlohmann::json;

Corpus corpus_of(const std::vector<int64_t>& sizes) {
  Corpus corpus;
  Random random(0, 0);
  for (const int64_t size : sizes) {
    std::string bytes;
    for (int64_t i = 0; i < size; ++i) bytes += static_cast<char>(random.below(256));
    corpus.append(fmt::format("document{}", corpus.num_documents()), bytes);
  }
  return corpus;
}

std::string bytes_of(const at::Tensor& tokens) {
  std::string bytes;
  for (const int64_t token : values(tokens)) bytes += static_cast<char>(token);
  return bytes;
}

TEST(TextStream, T11_edges_of_the_window_rule) {
  const auto make = [](int64_t size) { return make_text_stream(corpus_of({size}), 4, 64, 1); };
  for (const int64_t size : {0, 1, 256}) {
    const std::string error = error_of([&] { make(size); });
    EXPECT_NE(error.find(std::to_string(size) + " bytes"), std::string::npos) << error;
    EXPECT_NE(error.find("4 windows of 64 tokens needs 257"), std::string::npos) << error;
  }
  const struct { int64_t size, batches; } cases[] = {{257, 1}, {512, 1}, {513, 2}};
  for (const auto& [size, num_batches] : cases) {
    const std::string bytes(corpus_of({size}).bytes());
    const auto stream = make(size);
    std::set<std::string> seen;
    std::string last_labels;
    for (int64_t i = 0; i < num_batches; ++i) {
      const Batch batch = stream->next();
      ASSERT_EQ(batch.tokens.sizes(), (at::IntArrayRef{4, 64}));
      EXPECT_FALSE(batch.cu_seqlens.defined());
      for (int64_t row = 0; row < 4; ++row) {
        const std::string inputs = bytes_of(batch.tokens[row]), labels = bytes_of(batch.targets[row]);
        const size_t start = bytes.find(inputs);
        ASSERT_EQ(start % 64, 0u);
        EXPECT_EQ(labels, bytes.substr(start + 1, 64));
        EXPECT_TRUE(seen.insert(inputs).second);
        last_labels += labels.back();
      }
    }
    EXPECT_EQ(seen.size(), static_cast<size_t>(4 * num_batches));  // each window once an epoch
    if (size != 512) {
      EXPECT_NE(last_labels.find(bytes.back()), std::string::npos);  // the very last token is a label
    }
  }
}

TEST(TextStream, T01_resumes_around_the_last_full_batch_of_a_document) {
  const auto make = [] { return make_text_stream(corpus_of({1025, 4000}), 4, 64, 1); };
  for (const int64_t taken : {3, 4, 5}) expect_exact_continuation(make, taken, 20);
}

TEST(TextStream, T06_epochs_differ_and_resume_exactly) {
  const auto make = [] { return make_text_stream(corpus_of({64 * 4 * 5 + 1}), 4, 64, 9); };  // 5 batches an epoch
  for (const int64_t taken : {0, 1, 5, 7, 10, 14, 15}) expect_exact_continuation(make, taken, 17);
  const auto stream = make();
  std::vector<std::vector<std::string>> epochs(3);
  for (auto& epoch : epochs) {
    for (int i = 0; i < 5; ++i) {
      const Batch batch = stream->next();
      for (int64_t row = 0; row < 4; ++row) epoch.push_back(bytes_of(batch.tokens[row]));
    }
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
  for (auto& epoch : epochs) std::sort(epoch.begin(), epoch.end());
  EXPECT_EQ(epochs[0], epochs[1]);  // no window skipped or repeated
  EXPECT_EQ(epochs[1], epochs[2]);
  EXPECT_FALSE(same(make_text_stream(corpus_of({5000}), 4, 64, 1)->next(), make_text_stream(corpus_of({5000}), 4, 64, 2)->next()));
}

TEST(TextStream, T07_other_data_are_refused_by_name) {
  const auto saved = make_text_stream(corpus_of({1025, 4000}), 4, 64, 1);
  saved->next();
  const json position = saved->position();
  const auto refused = [&](std::unique_ptr<Stream> stream, const std::string& expected) {
    EXPECT_NE(stream->position().at("data"), position.at("data"));
    const Batch first = stream->next();
    const std::string error = error_of([&] { stream->seek(position); });
    EXPECT_NE(error.find(expected), std::string::npos) << error;
    stream->seek(position, true);
    EXPECT_EQ(stream->position()["batches"], 1);
  };
  Corpus changed;
  std::string bytes(corpus_of({1025}).bytes());
  bytes[500] ^= 1;
  changed.append("document0", bytes);
  changed.append("document1", corpus_of({1025, 4000}).document(1));
  refused(make_text_stream(changed, 4, 64, 1), "hash was");
  refused(make_text_stream(corpus_of({1025, 4000, 10}), 4, 64, 1), "documents was 2 and is 3");
  refused(make_text_stream(corpus_of({1025, 4000}), 4, 32, 1), "tokens_per_row was 64 and is 32");
  refused(make_text_stream(corpus_of({1025, 4000}), 2, 64, 1), "batch_size was 4 and is 2");
  refused(make_text_stream(corpus_of({1025, 4000}), 4, 64, 2), "seed was 1 and is 2");
  refused(make_task_stream(std::make_unique<FlipFlop>(0.8, 64), 4, 1), "kind was \"text\" and is \"flip_flop\"");
  EXPECT_EQ(make_text_stream(corpus_of({1025, 4000}), 4, 64, 1)->position().at("data"), position.at("data"));
}

TEST(Stream, damaged_positions_are_refused) {
  const auto stream = make_task_stream(std::make_unique<FlipFlop>(), 2, 1);
  const json good = stream->position();
  stream->seek(good);
  for (const char* damage :
       {"null", "[]", "{}", R"({"batches":1})", R"({"batches":-1,"data":{}})", R"({"batches":1.5,"data":{}})", R"({"batches":1,"data":7})"}) {
    EXPECT_NE(error_of([&] { stream->seek(json::parse(damage)); }).find("damaged"), std::string::npos) << damage;
  }
  EXPECT_EQ(stream->position(), good);
}

TEST(TextWindows, evaluation_windows_stay_inside_documents) {
  const Corpus corpus = corpus_of({100, 65, 64, 193, 1});
  const Batch all = evaluation_windows(corpus, 100, 64);
  ASSERT_EQ(all.tokens.size(0), 1 + 1 + 0 + 3 + 0);
  const size_t starts[] = {0, 100, 229, 293, 357};
  for (int64_t row = 0; row < 5; ++row) {
    EXPECT_EQ(bytes_of(all.tokens[row]), corpus.bytes().substr(starts[row], 64));
    EXPECT_EQ(bytes_of(all.targets[row]), corpus.bytes().substr(starts[row] + 1, 64));
  }
  EXPECT_TRUE(same(evaluation_windows(corpus, 3, 64), evaluation_windows(corpus, 3, 64)));
  EXPECT_EQ(evaluation_windows(corpus, 3, 64).tokens.size(0), 3);
  const std::string error = error_of([&] { evaluation_windows(corpus, 3, 193); });
  EXPECT_NE(error.find("longest validation file has 193 bytes, but a window of 193 tokens needs 194"), std::string::npos) << error;
  EXPECT_NE(error_of([] { evaluation_windows(Corpus(), 3, 64); }).find("has 0 bytes"), std::string::npos);
}

class RecipeStream : public testing::Test {
 protected:
  Recipe recipe(const json& data) const { return Recipe::from_json({{"data", data}}, "recipe.toml"); }
  ScratchFolder folder;
};

TEST_F(RecipeStream, text) {
  for (int i = 0; i < 20; ++i) folder.write(fmt::format("f{}.py", i), std::string(300, static_cast<char>('a' + i)));
  folder.write("notes.md", "not wanted");
  const json data = {{"kind", "text"}, {"files", folder / ""}, {"extensions", {".py"}}, {"validation_fraction", 0.25}};
  Recipe first = recipe(data), second = recipe(data), third = recipe(data);
  const auto stream = make_training_stream(first, 4, 64, 1);
  first.refuse_unread();
  EXPECT_EQ(stream->vocabulary_size(), 256);
  std::set<int64_t> trained, validated;
  for (int i = 0; i < 20; ++i) {
    for (const int64_t token : values(stream->next().tokens)) trained.insert(token);
  }
  const std::vector<Batch> validation = make_validation_batches(second, 4, 64, 100);
  second.refuse_unread();
  for (const Batch& batch : validation) {
    for (const int64_t token : values(batch.tokens)) validated.insert(token);
  }
  EXPECT_FALSE(validated.empty());
  for (const int64_t token : validated) EXPECT_FALSE(trained.contains(token)) << static_cast<char>(token);
  EXPECT_EQ(trained.size() + validated.size(), 20u);
  const std::vector<Batch> few = make_validation_batches(third, 4, 64, 2);
  ASSERT_EQ(few.size(), 2u);
  EXPECT_EQ(few[1].tokens.size(0), 4);
}

TEST_F(RecipeStream, flip_flop) {
  Recipe training = recipe({{"kind", "flip_flop"}, {"p_ignore", 0.5}});
  const Batch batch = make_training_stream(training, 2, 64, 7)->next();
  training.refuse_unread();
  EXPECT_TRUE(same(batch, FlipFlop(0.5, 64).sequences(7, kTraining, 0, 2)));
  Recipe validation = recipe({{"kind", "flip_flop"}});
  const std::vector<Batch> batches = make_validation_batches(validation, 2, 64, 3);
  ASSERT_EQ(batches.size(), 3u);
  EXPECT_TRUE(same(batches[2], FlipFlop(0.8, 64).sequences(0, kValidation, 4, 2)));
}

// Every kind reads its fields, takes no field of another, and validates on sequences that it does not train on.
TEST_F(RecipeStream, tasks) {
  const json recipes[] = {{{"kind", "flip_flop"}, {"p_ignore", 0.5}, {"test_reads", 100'000}},
                          {{"kind", "word_problem"}, {"group", "s5"}, {"prefix", 8}, {"curriculum_start", 2}, {"curriculum_threshold", 0.9}},
                          {{"kind", "mqrar"}, {"n_back", 4}, {"num_keys", 5}, {"num_values", 7}},
                          {{"kind", "swap_identity"}}};
  for (const json& data : recipes) {
    Recipe training = recipe(data), validation = recipe(data);
    const auto stream = make_training_stream(training, 2, 64, 7);
    training.refuse_unread();
    const std::vector<Batch> batches = make_validation_batches(validation, 2, 64, 3);
    ASSERT_EQ(batches.size(), 3u);
    EXPECT_EQ(batches[2].tokens.sizes(), (at::IntArrayRef{2, 64}));
    const Batch batch = stream->next();
    EXPECT_LT(batch.tokens.max().item<int64_t>(), stream->vocabulary_size());
    EXPECT_FALSE(same(batch, batches[0]));
    for (const auto& [field, value] : data.items()) {
      if (field != "kind" && field != "test_reads") {
        EXPECT_EQ(stream->position().at("data").at(field), value) << data;
      }
    }
    json other = data;
    other["split_seed"] = 3;
    Recipe unread = recipe(other);
    make_training_stream(unread, 2, 64, 7);
    EXPECT_NE(error_of([&] { unread.refuse_unread(); }).find("split_seed"), std::string::npos);
  }
}

TEST_F(RecipeStream, errors) {
  const auto training_error = [&](const json& data, int64_t tokens = 64) {
    Recipe settings = recipe(data);
    return error_of([&] { make_training_stream(settings, 4, tokens, 1); });
  };
  EXPECT_NE(training_error({{"kind", "flipflop"}}).find("one of \"text\", \"flip_flop\", \"word_problem\", \"mqrar\", \"swap_identity\""),
            std::string::npos);
  EXPECT_NE(training_error({{"kind", "text"}}).find("data.files is missing"), std::string::npos);
  EXPECT_NE(training_error({{"kind", "text"}, {"files", folder / "missing"}}).find(folder / "missing"), std::string::npos);
  EXPECT_NE(training_error({{"kind", "flip_flop"}, {"p_ignore", 1.5}}).find("data.p_ignore = 1.5"), std::string::npos);
  EXPECT_NE(training_error({{"kind", "flip_flop"}}, 63).find("even"), std::string::npos);
  EXPECT_NE(training_error({{"kind", "mqrar"}}, 63).find("even"), std::string::npos);
  EXPECT_NE(training_error({{"kind", "mqrar"}, {"n_back", 4}}, 8).find("no key can recur 4 times"), std::string::npos);
  EXPECT_NE(training_error({{"kind", "word_problem"}, {"group", "a4"}}).find("one of \"a5\", \"s5\", \"z60\""), std::string::npos);
  EXPECT_NE(training_error({{"kind", "word_problem"}, {"prefix", 8}}, 8).find("no room for a word after data.prefix = 8"), std::string::npos);
  EXPECT_NE(training_error({{"kind", "word_problem"}, {"prefix", 8}, {"curriculum_start", 5}}, 12).find("is above 4, the longest word"),
            std::string::npos);
  folder.write("a", std::string(1000, 'a'));
  Recipe no_validation = recipe({{"kind", "text"}, {"files", folder / "a"}, {"validation_fraction", 0}});
  EXPECT_NE(error_of([&] { make_validation_batches(no_validation, 4, 64, 1); }).find("data.validation_fraction"), std::string::npos);
}

}  // namespace
}  // namespace pathattn
