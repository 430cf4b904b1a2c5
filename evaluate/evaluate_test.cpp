// Evaluation against sums written out token by token, and a model whose answers are known.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <string>

#include "data/flip_flop.h"
#include "evaluate/bits_by_position.h"
#include "evaluate/flip_flop_error.h"

namespace pathattn {
namespace {

LanguageModel tiny_model(int64_t vocabulary_size) {
  ModelConfig config;
  config.vocabulary_size = vocabulary_size;
  config.hidden_size = 16;
  config.num_layers = 1;
  config.num_heads = config.num_kv_heads = 2;
  config.intermediate_size = 32;
  return LanguageModel(config, 1);
}

Batch random_batch(int64_t rows, int64_t length, int64_t vocabulary_size) {
  at::manual_seed(3);
  Batch batch{at::randint(0, vocabulary_size, {rows, length}, at::kLong), at::randint(0, vocabulary_size, {rows, length}, at::kLong), {}};
  batch.targets.masked_fill_(at::rand({rows, length}) < 0.3, kIgnoreTarget);
  return batch;
}

TEST(Evaluate, errors_are_counted_at_counted_targets_only) {
  const LanguageModel model = tiny_model(5);
  const Batch batch = random_batch(3, 40, 5);
  const at::Tensor logits = model.forward(batch.tokens).detach();
  int64_t wrong = 0, counted = 0;
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t t = 0; t < 40; ++t) {
      const int64_t target = batch.targets[row][t].item<int64_t>();
      if (target == kIgnoreTarget) continue;
      ++counted;
      wrong += logits[row][t].argmax().item<int64_t>() != target;
    }
  }
  const ErrorCount errors = count_errors(model, batch);
  EXPECT_EQ(errors.wrong, wrong);
  EXPECT_EQ(errors.counted, counted);
  EXPECT_DOUBLE_EQ(errors.percent(), 100.0 * wrong / counted);
}

TEST(Evaluate, bits_by_position_are_means_over_counted_targets) {
  const LanguageModel model = tiny_model(256);
  const Batch windows = random_batch(600, 32, 256);  // more rows than are run at once
  const at::Tensor log_probabilities = model.forward(windows.tokens).detach().to(at::kDouble).log_softmax(-1);
  const std::vector<int64_t> edges = {2, 10, 32};
  const auto bits = evaluate_bits_by_position(model, windows, edges);
  ASSERT_EQ(bits.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    const at::Tensor targets = windows.targets.slice(1, edges[i], edges[i + 1]);
    const at::Tensor counted = targets.ne(kIgnoreTarget);
    const at::Tensor nats = -log_probabilities.slice(1, edges[i], edges[i + 1]).gather(2, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1);
    const double expected = nats.index({counted}).mean().item<double>() / std::log(2.0);
    EXPECT_NEAR(bits.at(std::to_string(edges[i]) + "-" + std::to_string(edges[i + 1])).get<double>(), expected, 1e-5);
  }
}

TEST(Evaluate, a_model_that_knows_nothing) {
  const LanguageModel bytes = tiny_model(256), flip_flop = tiny_model(kNumFlipFlopTokens);
  for (const LanguageModel* model : {&bytes, &flip_flop}) {
    for (const auto& [name, parameter] : model->named_parameters()) parameter.detach().zero_();
  }
  EXPECT_NEAR(evaluate_bits_by_position(bytes, random_batch(2, 16, 256), {0, 16}).at("0-16").get<double>(), 8, 1e-6);
  const auto errors = evaluate_flip_flop(flip_flop, 5);  // all logits are equal: it always answers with token 0, which is no bit
  for (const char* set : {"in_distribution", "sparse", "dense"}) {
    EXPECT_EQ(errors.at(set), 100.0) << set;
    EXPECT_GE(errors.at("reads").at(set), 5) << set;
  }
}

}  // namespace
}  // namespace pathattn
