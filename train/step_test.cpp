// What a training step is made of: loss and gradients over micro-batches and padding, clipping, the optimizer's update.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "train/loss.h"
#include "train/optimizer.h"
#include "train/step.h"
#include "train/tiny_recipe.h"

namespace pathattn {
namespace {

const at::Tensor kSound = at::ones({}, at::kBool);

TEST(Step, adamw_follows_its_definition_and_spares_norms_biases_and_gates) {
  Recipe values = tiny_recipe({{"train", {{"weight_decay", 0.5}, {"gradient_clip", 0}, {"beta1", 0.8}, {"beta2", 0.9}}}});
  const LanguageModel model(model_config_from_recipe(values, 5), 1);
  AdamW optimizer(model, TrainSettings::read(values));
  std::map<std::string, at::Tensor> expected, first, second;
  for (const auto& [name, parameter] : model.named_parameters()) expected[name] = parameter.detach().to(at::kDouble).clone();
  for (int64_t step = 1; step <= 3; ++step) {
    for (const auto& [name, parameter] : model.named_parameters()) {
      const at::Tensor gradient = at::full_like(parameter, 0.1 * step).mul_(parameter.detach().sign() + 0.5);
      parameter.mutable_grad() = gradient;
      const bool decay = name.find("norm") == std::string::npos && name.find("bias") == std::string::npos && name.find("g_proj") == std::string::npos;
      at::Tensor& m = first.try_emplace(name, at::zeros_like(gradient, at::kDouble)).first->second;
      at::Tensor& v = second.try_emplace(name, at::zeros_like(gradient, at::kDouble)).first->second;
      m = 0.8 * m + 0.2 * gradient;
      v = 0.9 * v + 0.1 * gradient * gradient;
      const at::Tensor update = (m / (1 - std::pow(0.8, step))) / ((v / (1 - std::pow(0.9, step))).sqrt() + 1e-8);
      expected[name] = expected[name] * (decay ? 1 - 0.01 * 0.5 : 1) - 0.01 * update;
    }
    optimizer.add_gradients();
    optimizer.clip_gradients();
    optimizer.step(at::scalar_tensor(0.01), kSound);
  }
  for (const auto& [name, parameter] : model.named_parameters()) {
    EXPECT_LT((parameter.detach() - expected[name]).abs().max().item<double>(), 1e-6) << name;
  }
}

TEST(Step, gradients_are_clipped_by_their_global_norm) {
  Recipe values = tiny_recipe();
  const LanguageModel model(model_config_from_recipe(values, 5), 1);
  AdamW optimizer(model, TrainSettings::read(values));
  int64_t count = 0;
  for (const auto& [name, parameter] : model.named_parameters()) {
    parameter.mutable_grad() = at::full_like(parameter, 0.1);
    count += parameter.numel();
  }
  optimizer.add_gradients();
  EXPECT_NEAR(optimizer.clip_gradients().item<double>(), 0.1 * std::sqrt(count), 1e-4);
  EXPECT_NEAR(optimizer.clip_gradients().item<double>(), 0.5, 1e-5);
}

TEST(Step, gradients_below_the_threshold_are_left_as_they_are) {
  for (const double threshold : {0.0, 1.0, 2.0}) {  // 0: no clipping
    Recipe values = tiny_recipe({{"train", {{"gradient_clip", threshold}}}});
    const LanguageModel model(model_config_from_recipe(values, 5), 1);
    AdamW optimizer(model, TrainSettings::read(values));
    const double norm = threshold > 0 ? 0.999 * threshold : 100;
    for (const auto& [name, parameter] : model.named_parameters()) parameter.mutable_grad() = at::zeros_like(parameter);
    model.named_parameters()[0].second.mutable_grad().view(-1)[0] = norm;
    optimizer.add_gradients();
    for (int repeat = 0; repeat < 2; ++repeat) EXPECT_FLOAT_EQ(optimizer.clip_gradients().item<float>(), norm) << threshold;
  }
}

// Rows with different numbers of counted targets, as padding leaves them.
Batch uneven_batch(int64_t rows, int64_t tokens) {
  at::manual_seed(1);
  Batch batch{at::randint(0, 5, {rows, tokens}, at::kLong), at::randint(0, 5, {rows, tokens}, at::kLong), {}};
  for (int64_t row = 0; row < rows; ++row) batch.targets[row].narrow(0, tokens - 15 * row, 15 * row).fill_(kIgnoreTarget);
  return batch;
}

TEST(Step, T10_micro_batches_are_weighted_by_their_tokens) {
  Recipe values = tiny_recipe({{"train", {{"gradient_clip", 0}}}});
  const LanguageModel model(model_config_from_recipe(values, 5), 1);
  AdamW optimizer(model, TrainSettings::read(values));
  const Batch batch = uneven_batch(8, 128);
  const double loss = accumulate_gradients(model, optimizer, batch, 1).loss.item<double>(), norm = optimizer.clip_gradients().item<double>();
  optimizer.step(at::zeros({}), kSound);
  EXPECT_NEAR(mean_loss(model, {batch}), loss, 1e-5 * loss);
  for (int64_t parts : {2, 4, 8}) {
    EXPECT_NEAR(accumulate_gradients(model, optimizer, batch, parts).loss.item<double>(), loss, 1e-5 * loss) << parts;
    EXPECT_NEAR(optimizer.clip_gradients().item<double>(), norm, 1e-5 * norm) << parts;
    optimizer.step(at::zeros({}), kSound);
  }
}

TEST(Step, accuracy_is_the_share_of_counted_targets_that_are_likeliest) {
  Recipe values = tiny_recipe();
  const LanguageModel model(model_config_from_recipe(values, 5), 1);
  AdamW optimizer(model, TrainSettings::read(values));
  const Batch batch = uneven_batch(8, 128);
  const at::Tensor likeliest = model.forward(batch.tokens).argmax(-1);
  batch.targets.copy_(at::where(batch.targets.ne(kIgnoreTarget), (likeliest + 1) % 5, kIgnoreTarget));
  batch.targets.select(1, -1).copy_((likeliest.select(1, -1) + 1) % 5);
  batch.targets.select(1, -1).narrow(0, 1, 3).copy_(likeliest.select(1, -1).narrow(0, 1, 3));
  batch.targets[0][5] = likeliest[0][5];
  batch.targets[7][127] = kIgnoreTarget;
  for (const int64_t parts : {1, 4}) {
    const BatchResult result = accumulate_gradients(model, optimizer, batch, parts);
    EXPECT_DOUBLE_EQ(result.last_accuracy.item<double>(), 3.0 / 8) << parts;
    EXPECT_NEAR(result.accuracy.item<double>(), 4.0 / static_cast<double>(count_targets(batch)), 1e-7) << parts;
  }
}

TEST(Step, unsound_gradients_change_nothing) {
  Recipe values = tiny_recipe();
  const LanguageModel model(model_config_from_recipe(values, 5), 1), untouched(model_config_from_recipe(values, 5), 1);
  AdamW optimizer(model, TrainSettings::read(values));
  for (const auto& [name, parameter] : model.named_parameters()) parameter.mutable_grad() = at::full_like(parameter, NAN);
  optimizer.add_gradients();
  optimizer.clip_gradients();
  optimizer.step(at::ones({}), kSound.logical_not());
  for (size_t i = 0; i < model.named_parameters().size(); ++i)
    EXPECT_TRUE(at::equal(model.named_parameters()[i].second, untouched.named_parameters()[i].second)) << model.named_parameters()[i].first;
  for (const auto& [name, moment] : optimizer.state()) EXPECT_FALSE(moment.any().item<bool>()) << name;

  AdamW fresh(untouched, TrainSettings::read(values));  // nor the count of steps, by which the moments are divided
  for (const auto& [stepped, its_optimizer] : {std::pair{&model, &optimizer}, {&untouched, &fresh}}) {
    for (const auto& [name, parameter] : stepped->named_parameters()) parameter.mutable_grad() = at::full_like(parameter, 0.1);
    its_optimizer->add_gradients();
    its_optimizer->step(at::scalar_tensor(0.01), kSound);
  }
  for (size_t i = 0; i < model.named_parameters().size(); ++i)
    EXPECT_TRUE(at::equal(model.named_parameters()[i].second, untouched.named_parameters()[i].second)) << model.named_parameters()[i].first;
}

TEST(Step, does_what_its_parts_do) {
  Recipe values = tiny_recipe();
  const LanguageModel model(model_config_from_recipe(values, 5), 1), twin(model_config_from_recipe(values, 5), 1);
  AdamW optimizer(model, TrainSettings::read(values)), twin_optimizer(twin, TrainSettings::read(values));
  const Batch batch = uneven_batch(8, 128);
  batch.targets.select(1, -1).copy_(model.forward(batch.tokens).argmax(-1).select(1, -1));  // so that the accuracies differ
  const StepResult result = TrainingStep(model, optimizer, 2)(batch, 0.01);
  const BatchResult expected = accumulate_gradients(twin, twin_optimizer, batch, 2);
  EXPECT_EQ(result.loss, expected.loss.item<double>());
  EXPECT_EQ(result.gradient_norm, twin_optimizer.clip_gradients().item<double>());
  EXPECT_EQ(result.accuracy, expected.accuracy.item<double>());
  EXPECT_EQ(result.last_accuracy, expected.last_accuracy.item<double>());
  EXPECT_NE(result.accuracy, result.last_accuracy);
  twin_optimizer.step(at::scalar_tensor(0.01), kSound);
  for (size_t i = 0; i < model.named_parameters().size(); ++i)
    EXPECT_TRUE(at::equal(model.named_parameters()[i].second, twin.named_parameters()[i].second)) << model.named_parameters()[i].first;
}

// Padding on the right is seen by no counted row. Padding on the left would be: there each row is packed as two documents, its padding and its text.
TEST(Step, P20_padding_adds_nothing) {
  Recipe values = tiny_recipe({{"train", {{"gradient_clip", 0}}}});
  const ModelConfig config = model_config_from_recipe(values, 5);
  const LanguageModel model(config, 1);
  at::manual_seed(2);
  Batch right{at::zeros({4, 128}, at::kLong), at::full({4, 128}, kIgnoreTarget, at::kLong), {}},
      left{right.tokens.clone(), right.targets.clone(), {}};
  std::vector<int64_t> documents = {0};
  double loss = 0;
  for (const int64_t length : {7, 64, 65, 128}) {
    const int64_t first = documents.back(), row = first / 128;
    const Batch alone{at::randint(0, 5, {1, length}, at::kLong), at::randint(0, 5, {1, length}, at::kLong), {}};
    for (const auto& [batch, start] : {std::pair<Batch*, int64_t>{&right, 0}, {&left, 128 - length}}) {
      batch->tokens[row].narrow(0, start, length).copy_(alone.tokens[0]);
      batch->targets[row].narrow(0, start, length).copy_(alone.targets[0]);
    }
    documents.insert(documents.end(), {first + 128 - length, first + 128});
    loss += mean_loss(model, {alone}) * length / 264;
    (at::cross_entropy_loss(model.forward(alone.tokens)[0], alone.targets[0], {}, at::Reduction::Sum) / 264).backward();
  }
  for (const Batch& batch : {right, Batch{left.tokens.view({1, 512}), left.targets.view({1, 512}), torch::tensor(documents)}}) {
    const LanguageModel padded(config, 1);
    AdamW optimizer(padded, TrainSettings::read(values));
    EXPECT_NEAR(accumulate_gradients(padded, optimizer, batch, 1).loss.item<double>(), loss, 1e-5 * loss);
    optimizer.step(at::zeros({}), kSound);
    for (const auto& [name, parameter] : model.named_parameters()) {  // after one step the first moment is 0.1 times the gradient
      const at::Tensor difference = optimizer.state().at("first_moment." + name) - 0.1 * parameter.grad();
      EXPECT_LT(difference.norm().item<double>(), 1e-6 * parameter.grad().norm().item<double>()) << name;
    }
  }
}

}  // namespace
}  // namespace pathattn
