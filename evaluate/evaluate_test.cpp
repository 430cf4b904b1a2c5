// Evaluation against sums written out token by token, and a model whose answers are known.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <functional>
#include <string>

#include "base/error_of.h"
#include "evaluate/bits_by_position.h"
#include "evaluate/task_metrics.h"

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
  const auto errors = evaluate_flip_flop(flip_flop, FlipFlop(), 0, 5);  // all logits are equal: it always answers with token 0, which is no bit
  for (const char* set : {"in_distribution", "sparse", "dense"}) {
    EXPECT_EQ(errors.at(set), 100.0) << set;
    EXPECT_GE(errors.at("reads").at(set), 5) << set;
  }
}

TEST(Evaluate, flip_flop_sets_have_the_reads_asked_for) {
  const auto result = evaluate_flip_flop(tiny_model(kNumFlipFlopTokens), FlipFlop(0.8, 64), 3000, 0);
  for (const auto& [set, reads] : result.at("reads").items()) EXPECT_GE(reads, 3000) << set;
  EXPECT_LT(result.at("reads").at("sparse"), 4000);  // no more batches than needed
}

// Each metric against the model's answers to all test sequences at once.
TEST(Evaluate, tasks_count_what_their_targets_say) {
  const int64_t rows = 700;  // more than are run at once
  const WordProblem word_problem({"a5", 2}, 30);
  const Mqrar mqrar({.n_back = 2, .num_keys = 4, .num_values = 3}, 30);
  const SwapIdentity swap_identity(30);
  const auto right_of = [&](const LanguageModel& model, const SyntheticTask& task) {
    const Batch batch = task.sequences(0, kTest, 0, rows);
    return std::pair{model.forward(batch.tokens).argmax(-1).eq(batch.targets), batch.targets};
  };
  const auto percent = [](const at::Tensor& right) { return 100 * right.to(at::kDouble).mean().item<double>(); };
  {
    const LanguageModel model = tiny_model(word_problem.vocabulary_size());
    const auto [right_BT, targets_BT] = right_of(model, word_problem);
    const auto result = evaluate_word_problem(model, word_problem, rows);
    ASSERT_EQ(result.at("accuracy").size(), 28u);
    for (int64_t length = 1; length <= 28; ++length)
      EXPECT_NEAR(result.at("accuracy").at(std::to_string(length)).get<double>(), percent(right_BT.select(1, 1 + length)), 1e-9);
  }
  {
    const LanguageModel model = tiny_model(mqrar.vocabulary_size());
    const auto [right_BT, targets_BT] = right_of(model, mqrar);
    const at::Tensor counted_BT = targets_BT.ne(kIgnoreTarget);
    const auto result = evaluate_mqrar(model, mqrar, rows);
    EXPECT_NEAR(result.at("accuracy").get<double>(), percent(right_BT.index({counted_BT})), 1e-9);
    EXPECT_EQ(result.at("recalls"), counted_BT.sum().item<int64_t>());
  }
  {
    const LanguageModel model = tiny_model(swap_identity.vocabulary_size());
    for (const auto& [name, parameter] : model.named_parameters()) {
      if (name == "lm_head.weight") parameter.detach().narrow(0, 0, kMoved).zero_();  // so that both answers are given
    }
    const auto [right_BT, targets_BT] = right_of(model, swap_identity);
    const auto result = evaluate_swap_identity(model, swap_identity, rows);
    EXPECT_NEAR(result.at("accuracy").at("same").get<double>(), percent(right_BT.index({targets_BT.eq(kSame)})), 1e-9);
    EXPECT_NEAR(result.at("accuracy").at("moved").get<double>(), percent(right_BT.index({targets_BT.eq(kMoved)})), 1e-9);
    EXPECT_EQ(result.at("products").at("same"), targets_BT.eq(kSame).sum().item<int64_t>());
    EXPECT_GT(result.at("accuracy").at("moved").get<double>() + result.at("accuracy").at("same").get<double>(), 0);
  }
}

TEST(Evaluate, nothing_counted_is_an_error) {
  const Mqrar mqrar({.n_back = 4, .num_keys = 32, .num_values = 32}, 10);
  const auto expect_error = [](const std::string& what, const std::function<void()>& evaluate) {
    EXPECT_EQ(error_of(evaluate), "no " + what + " in these sequences: raise --sequences or train.tokens");
  };
  expect_error("key that recurs", [&] { evaluate_mqrar(tiny_model(mqrar.vocabulary_size()), mqrar, 3); });
  expect_error("product that is \"moved\"", [] { evaluate_swap_identity(tiny_model(kNumSwapTokens), SwapIdentity(1), 1); });
}

TEST(Evaluate, weights_that_are_no_numbers_are_named) {
  for (const double value : {std::nan(""), HUGE_VAL}) {
    const LanguageModel bytes = tiny_model(256), flip_flop = tiny_model(kNumFlipFlopTokens);
    for (const LanguageModel* model : {&bytes, &flip_flop}) {
      for (const auto& [name, parameter] : model->named_parameters()) {
        if (name == "model.norm.weight") parameter.detach().fill_(value);
      }
    }
    const auto expect_error = [](const std::function<void()>& evaluate) {
      EXPECT_NE(error_of(evaluate).find("the logit of token 0 at position 0 is not a number but "), std::string::npos);
    };
    expect_error([&] { evaluate_bits_by_position(bytes, random_batch(2, 16, 256), {0, 16}); });
    expect_error([&] { evaluate_flip_flop(flip_flop, FlipFlop(), 0, 5); });
  }
}

TEST(Evaluate, a_model_of_another_task_is_refused) {
  const LanguageModel model = tiny_model(7);
  const auto expect_refusal = [](const std::function<void()>& evaluate) {
    EXPECT_NE(error_of(evaluate).find("evaluate it on what it was trained on"), std::string::npos);
  };
  expect_refusal([&] { evaluate_flip_flop(model, FlipFlop(), 10, 1); });
  expect_refusal([&] { evaluate_word_problem(model, WordProblem({"a5"}, 4), 1); });
  expect_refusal([&] { evaluate_mqrar(model, Mqrar({}, 8), 1); });
  expect_refusal([&] { evaluate_swap_identity(model, SwapIdentity(8), 1); });
}

}  // namespace
}  // namespace pathattn
