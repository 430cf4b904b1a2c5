#include "generate/generate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "model/test_models.h"
#include "text/utf8_stream.h"

namespace pathattn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kDoubleInfinity = std::numeric_limits<double>::infinity();

std::vector<int64_t> draw(const std::vector<float>& logits, const SamplingOptions& options, int64_t count = 2000, uint64_t seed = 1) {
  Random random(seed, 0);
  std::vector<int64_t> counts(logits.size());
  for (int64_t i = 0; i < count; ++i) ++counts.at(sample(logits, options, random));
  return counts;
}

std::vector<int64_t> prompt_of(int64_t length, uint64_t seed) {
  const at::Tensor tokens = random_tokens(1, length, 50, seed);
  return {tokens.const_data_ptr<int64_t>(), tokens.const_data_ptr<int64_t>() + length};
}

TEST(Sampler, S07_values_outside_their_range_are_named) {
  const double nan = std::nan("");
  for (const double temperature : {-1.0, -1e-9, kDoubleInfinity, nan})
    EXPECT_EQ(error_of([&] { SamplingOptions{.temperature = temperature}.check(); }).find("temperature is "), 0u) << temperature;
  for (const double top_p : {-1.0, 0.0, 1.0001, 2.0, nan})
    EXPECT_EQ(error_of([&] { SamplingOptions{.top_p = top_p}.check(); }).find("top_p is "), 0u) << top_p;
  EXPECT_EQ(error_of([] { SamplingOptions{.top_k = -1}.check(); }).find("top_k is -1"), 0u);
  for (const double temperature : {0.0, 1e-9, 1e6}) SamplingOptions{.temperature = temperature}.check();
}

TEST(Sampler, S07_temperature) {
  const std::vector<float> logits = {1, 3, 3, 2};
  EXPECT_EQ(draw(logits, {.temperature = 0}), (std::vector<int64_t>{0, 2000, 0, 0}));
  const auto cold = draw(logits, {.temperature = 1e-9});
  EXPECT_EQ(cold[0] + cold[3], 0);
  EXPECT_GT(cold[2], 850);
  for (const int64_t count : draw(logits, {.temperature = 1e6})) EXPECT_NEAR(count, 500, 90);
}

TEST(Sampler, probabilities_follow_the_logits) {
  const auto counts = draw({std::log(0.5f), std::log(0.3f), std::log(0.2f)}, {}, 20000);
  EXPECT_NEAR(counts[0], 10000, 350);
  EXPECT_NEAR(counts[1], 6000, 350);
  EXPECT_NEAR(counts[2], 4000, 350);
}

TEST(Sampler, S07_top_p_and_top_k) {
  const std::vector<float> logits = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  EXPECT_EQ(draw(logits, {.top_p = 0.49})[1], 2000);
  EXPECT_EQ(draw(logits, {.top_p = 1e-300})[1], 2000);
  EXPECT_EQ(draw(logits, {.top_p = 0.7})[0], 0);
  EXPECT_GT(draw(logits, {.top_p = 0.9})[0], 0);
  EXPECT_EQ(draw(logits, {.top_k = 1})[1], 2000);
  EXPECT_EQ(draw(logits, {.top_k = 2})[0], 0);
  EXPECT_EQ(draw(logits, {.top_k = 1000000000}), draw(logits, {.top_k = 3}));
}

TEST(Sampler, S07_extreme_logits) {
  for (const double temperature : {0.0, 1e-9, 1.0, 1e6}) {
    const SamplingOptions options{.temperature = temperature};
    EXPECT_EQ(draw({0, kInfinity, 5}, options)[1], 2000);
    EXPECT_EQ(draw({-kInfinity, -kInfinity, -3}, options)[2], 2000);
    EXPECT_NE(error_of([&] { draw({0, std::nanf(""), 5}, options); }).find("token 1 is not a number"), std::string::npos);
    EXPECT_NE(error_of([&] { draw({-kInfinity, -kInfinity}, options); }).find("all logits are -infinity"), std::string::npos);
  }
  for (const int64_t count : draw({3, 3, 3, 3}, {})) EXPECT_NEAR(count, 500, 90);
  const auto two_infinities = draw({kInfinity, 0, kInfinity}, {});
  EXPECT_EQ(two_infinities[1], 0);
  EXPECT_NEAR(two_infinities[0], 1000, 120);
}

TEST(Generate, G01_prompts_of_different_lengths_in_one_batch_as_each_alone) {
  for (const ModelConfig& config : small_configs()) {
    const LanguageModel model = random_model(config);
    const std::vector<std::vector<int64_t>> prompts = {prompt_of(5, 1), prompt_of(17, 2), prompt_of(400, 3)};
    GenerateOptions options{.max_new_tokens = 100};
    options.sampling.temperature = 0;
    const auto together = generate(model, prompts, options);
    for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(together[i], generate(model, {prompts[i]}, options)[0]) << describe(config) << i;
  }
}

TEST(Generate, G10_short_prompts_give_the_logits_of_the_whole_forward) {
  torch::NoGradGuard no_gradients;
  for (ModelConfig config : small_configs()) {
    config.bos_token_id = 7;
    const LanguageModel model = random_model(config);
    for (const int64_t length : {0, 1, 2, 3}) {
      const std::vector<int64_t> prompt = prompt_of(length, 4);
      GenerateOptions options{.max_new_tokens = 11};
      options.sampling.temperature = 0;
      const auto generated = generate(model, {prompt}, options)[0];
      std::vector<int64_t> whole = length == 0 ? std::vector<int64_t>{7} : prompt;
      const int64_t first = static_cast<int64_t>(whole.size()) - 1;
      whole.insert(whole.end(), generated.begin(), generated.end() - 1);
      const at::Tensor predicted = model.forward(torch::tensor(whole).unsqueeze(0))[0].argmax(-1);
      for (int64_t i = 0; i < 11; ++i) EXPECT_EQ(predicted[first + i].item<int64_t>(), generated[i]) << describe(config) << length;
    }
  }
}

TEST(Generate, an_empty_prompt_without_bos_is_refused) {
  const LanguageModel model = random_model(small_config(AttentionKind::kPath));
  EXPECT_NE(error_of([&] { generate(model, {{1}, {}}, {}); }).find("prompt 1 is empty"), std::string::npos);
  EXPECT_NE(error_of([&] { generate(model, {{50}}, {}); }).find("token 50"), std::string::npos);
  EXPECT_NE(error_of([&] { generate(model, {{1}}, {.max_new_tokens = -1}); }).find("max_new_tokens is -1"), std::string::npos);
  EXPECT_TRUE(generate(model, {{1}}, {.max_new_tokens = 0})[0].empty());
  EXPECT_TRUE(generate(model, {}, {}).empty());
}

TEST(Generate, the_seed_decides_and_tokens_stream) {
  const LanguageModel model = random_model(small_config(AttentionKind::kPathFox));
  const GenerateOptions options{.max_new_tokens = 30, .seed = 3};
  std::vector<int64_t> streamed;
  const auto once = generate(model, {{1, 2}, {3}}, options, [&](int64_t prompt, int64_t token) {
    if (prompt == 1) streamed.push_back(token);
  });
  EXPECT_EQ(once, generate(model, {{1, 2}, {3}}, options));
  EXPECT_EQ(once[1], streamed);
  EXPECT_EQ(once[0], generate(model, {{1, 2}}, options)[0]);
  EXPECT_NE(once, generate(model, {{1, 2}, {3}}, {.max_new_tokens = 30, .seed = 4}));
}

TEST(Generate, stops_at_the_end_token) {
  ModelConfig config = small_config(AttentionKind::kPath);
  GenerateOptions options{.max_new_tokens = 40};
  options.sampling.temperature = 0;
  const auto without = generate(random_model(config), {{5, 6}, {9}}, options);
  config.eos_token_id = without[0][3];
  const auto with = generate(random_model(config), {{5, 6}, {9}}, options);
  for (size_t i = 0; i < 2; ++i) {
    const auto end = std::find(without[i].begin(), without[i].end(), *config.eos_token_id);
    EXPECT_EQ(with[i], std::vector<int64_t>(without[i].begin(), end));
  }
}

TEST(Generate, S02_random_weights_give_valid_text) {
  ModelConfig config = small_config(AttentionKind::kPath);
  config.vocabulary_size = 256;
  const LanguageModel model = random_model(config);
  const size_t num_streams = 100, length = 2000;
  std::vector<Utf8Stream> streams(num_streams);
  std::vector<std::string> texts(num_streams);
  GenerateOptions options{.max_new_tokens = length, .seed = 1};
  options.sampling.temperature = 1.5;
  const auto generated = generate(model, std::vector<std::vector<int64_t>>(num_streams, {65}), options, [&](int64_t i, int64_t token) {
    const std::string piece = streams[i].feed(std::string(1, static_cast<char>(token)));
    EXPECT_NO_THROW(nlohmann::json(piece).dump());  // throws where it is not UTF-8
    texts[i] += piece;
  });
  for (size_t i = 0; i < num_streams; ++i) {
    ASSERT_EQ(generated[i].size(), length);
    Utf8Stream whole;
    const std::string at_once = whole.feed(std::string(generated[i].begin(), generated[i].end()));
    EXPECT_EQ(texts[i] + streams[i].finish(), at_once + whole.finish());
    EXPECT_NO_THROW(nlohmann::json(at_once).dump());
    EXPECT_NE(texts[i], texts[(i + 1) % num_streams]);
  }
}

}  // namespace
}  // namespace pathattn
