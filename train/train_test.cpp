// Runs of a tiny model: resuming changes no bit, other data and recipes are refused, damaged checkpoints are passed over, divergence is reported.
#include "train/train.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <set>

#include "base/error_of.h"
#include "base/files.h"
#include "base/scratch_folder.h"
#include "model/checkpoint.h"
#include "train/checkpoint.h"
#include "train/loss.h"
#include "train/metrics.h"
#include "train/optimizer.h"
#include "train/run_folder.h"

namespace pathattn {
namespace {
namespace fs = std::filesystem;
using nlohmann::json;

const at::Tensor kSound = at::ones({}, at::kBool);

class Training : public testing::Test {
 protected:
  // A tiny recipe on the flip-flop language; `changes` is merged into it.
  static Recipe recipe(const json& changes = json::object()) {
    json values = {{"model", {{"kind", "path_fox"}, {"hidden_size", 16}, {"num_layers", 1}, {"num_heads", 2}, {"intermediate_size", 32}}},
                   {"data", {{"kind", "flip_flop"}}},
                   {"train",
                    {{"batch_size", 4},
                     {"tokens", 32},
                     {"steps", 12},
                     {"warmup_steps", 8},
                     {"checkpoint_every", 6},
                     {"validate_every", 0},
                     {"gradient_clip", 0.5}}}};
    values.merge_patch(changes);
    return Recipe::from_json(values, "tiny");
  }

  // Text of `num_files` files of `size` bytes, as a change to recipe().
  json text(int64_t num_files, int64_t size) {
    for (int64_t file = 0; file < num_files; ++file) {
      std::string bytes;
      for (int64_t i = 0; i < size; ++i) bytes += static_cast<char>('a' + (i * (file + 3) + i / 7) % 26);
      write_file_atomically(folder_ / "text" / fmt::format("{}.txt", file), bytes);
    }
    return {{"data", {{"kind", "text"}, {"files", (folder_ / "text").string()}, {"p_ignore", nullptr}}}};
  }

  // Trains `straight` to the end, and again up to `stop` and from there on with --resume; both must have left the same bits.
  void expect_exact_continuation(json changes, int64_t steps, int64_t stop) {
    changes["train"]["steps"] = steps;
    changes["train"]["checkpoint_every"] = stop;
    const fs::path straight = folder_ / "straight", stopped = folder_ / "stopped";
    fs::remove_all(straight);
    fs::remove_all(stopped);
    train(recipe(changes), straight);
    train(recipe(changes), stopped);
    for (const auto& checkpoint : fs::directory_iterator(stopped / "checkpoints")) {
      if (checkpoint.path().filename() != fmt::format("step-{:06}", stop)) fs::remove_all(checkpoint);
    }
    EXPECT_EQ(train(recipe(changes), stopped, {.resume = true}).step, steps);
    const fs::path last = fs::path("checkpoints") / fmt::format("step-{:06}", steps);
    for (const char* file : {"model.safetensors", "trainer.safetensors"})
      EXPECT_EQ(read_file(straight / last / file), read_file(stopped / last / file)) << file;
    EXPECT_EQ(logged(straight), logged(stopped));
    EXPECT_EQ(static_cast<int64_t>(logged(straight).size()), steps);
  }

  // (step, loss, learning rate, gradient norm, tokens of a row in a curriculum) of each line of the metrics.
  static std::vector<std::vector<double>> logged(const fs::path& run) {
    std::vector<std::vector<double>> lines;
    std::ifstream file(run / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const json values = json::parse(line);
      lines.push_back(
          {values.at("step"), values.at("loss"), values.at("learning_rate"), values.at("gradient_norm"), values.value("tokens_per_row", 0.0)});
    }
    return lines;
  }

  const ScratchFolder scratch_;
  const fs::path folder_ = scratch_.path();
};

TEST_F(Training, learning_rate_warms_up_and_follows_a_cosine) {
  Recipe values = recipe({{"train", {{"learning_rate", 2.0}, {"steps", 18}, {"warmup_steps", 8}, {"final_learning_rate_fraction", 0.25}}}});
  const TrainSettings settings = TrainSettings::read(values);
  EXPECT_DOUBLE_EQ(settings.learning_rate_at(1), 0.25);
  EXPECT_DOUBLE_EQ(settings.learning_rate_at(8), 2);
  EXPECT_DOUBLE_EQ(settings.learning_rate_at(13), 1.25);
  EXPECT_DOUBLE_EQ(settings.learning_rate_at(18), 0.5);
}

TEST_F(Training, metrics_after_the_checkpoint_are_cut) {
  const fs::path path = folder_ / "metrics.jsonl";
  write_file_atomically(path, "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 2, \"validation_loss\": 1}\n{\"step\": 3}\n{\"ste");
  Metrics(path, 2).write({{"step", 3}, {"loss", 0.5}});
  EXPECT_EQ(read_file(path), "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 2, \"validation_loss\": 1}\n{\"loss\":0.5,\"step\":3}\n");
}

TEST_F(Training, lines_that_are_no_metrics_are_cut) {
  const fs::path path = folder_ / "metrics.jsonl";
  write_file_atomically(path, "{\"step\": 1}\n{\"step\": \"2\"}\n[2]\n\n{\"loss\": 2}\n{\"step\": 2}\n");
  Metrics(path, 2);
  EXPECT_EQ(read_file(path), "{\"step\": 1}\n{\"step\": 2}\n");
}

TEST_F(Training, adamw_follows_its_definition_and_spares_norms_biases_and_gates) {
  Recipe values = recipe({{"train", {{"weight_decay", 0.5}, {"gradient_clip", 0}, {"beta1", 0.8}, {"beta2", 0.9}}}});
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

TEST_F(Training, gradients_are_clipped_by_their_global_norm) {
  Recipe values = recipe();
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

TEST_F(Training, gradients_below_the_threshold_are_left_as_they_are) {
  for (const double threshold : {0.0, 1.0, 2.0}) {  // 0: no clipping
    Recipe values = recipe({{"train", {{"gradient_clip", threshold}}}});
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

TEST_F(Training, T10_micro_batches_are_weighted_by_their_tokens) {
  Recipe values = recipe({{"train", {{"gradient_clip", 0}}}});
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

TEST_F(Training, accuracy_is_the_share_of_counted_targets_that_are_likeliest) {
  Recipe values = recipe();
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

TEST_F(Training, unsound_gradients_change_nothing) {
  Recipe values = recipe();
  const LanguageModel model(model_config_from_recipe(values, 5), 1), untouched(model_config_from_recipe(values, 5), 1);
  AdamW optimizer(model, TrainSettings::read(values));
  for (const auto& [name, parameter] : model.named_parameters()) parameter.mutable_grad() = at::full_like(parameter, NAN);
  optimizer.add_gradients();
  optimizer.clip_gradients();
  optimizer.step(at::ones({}), kSound.logical_not());
  for (size_t i = 0; i < model.named_parameters().size(); ++i)
    EXPECT_TRUE(at::equal(model.named_parameters()[i].second, untouched.named_parameters()[i].second)) << model.named_parameters()[i].first;
  for (const auto& [name, moment] : optimizer.state()) EXPECT_FALSE(moment.any().item<bool>()) << name;
}

// Padding on the right is seen by no counted row. Padding on the left would be: there each row is packed as two documents, its padding and its text.
TEST_F(Training, P20_padding_adds_nothing) {
  Recipe values = recipe({{"train", {{"gradient_clip", 0}}}});
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

TEST_F(Training, T02_resumed_run_equals_an_uninterrupted_one) {
  expect_exact_continuation({}, 12, 6);
  expect_exact_continuation({{"train", {{"accumulation", 2}}}}, 12, 7);
}

// Words grow at some steps before and after the cut: a threshold of 0 is passed as soon as one of the last states is right.
TEST_F(Training, T02_a_curriculum_goes_on_where_it_was) {
  const json changes = {{"data", {{"kind", "word_problem"}, {"group", "z60"}, {"prefix", 2}, {"curriculum_start", 1}, {"curriculum_threshold", 0}}},
                        {"train", {{"batch_size", 32}}}};
  expect_exact_continuation(changes, 24, 12);
  const auto tokens_per_row = [lines = logged(folder_ / "straight")](size_t step) { return lines.at(step - 1).at(4); };
  EXPECT_EQ(tokens_per_row(1), 3);
  EXPECT_LT(tokens_per_row(1), tokens_per_row(12));
  EXPECT_LT(tokens_per_row(12), tokens_per_row(24));
}

// A share of 0.01 is reached as soon as one of 32 last states is right, but words shorter than the longest do not count.
TEST_F(Training, mastered_task_ends_a_run_early_and_for_good) {
  const json changes = {{"data", {{"kind", "word_problem"}, {"group", "z60"}, {"curriculum_start", 1}, {"curriculum_threshold", 0}}},
                        {"train", {{"batch_size", 32}, {"tokens", 3}, {"steps", 500}, {"log_every", 7}, {"stop_at_accuracy", 0.01}}}};
  const fs::path run = folder_ / "run";
  const int64_t step = train(recipe(changes), run).step;
  EXPECT_LT(step, 500);
  const json record = json::parse(read_file(run / "run.json"));
  EXPECT_EQ(record.at("status"), "finished");
  EXPECT_TRUE(record.at("mastered"));
  EXPECT_EQ(logged(run).back().at(0), step);
  EXPECT_EQ(logged(run).back().at(4), 3);
  const std::string before = read_file(run / "metrics.jsonl");
  EXPECT_EQ(train(recipe(changes), run, {.resume = true}).step, step);
  EXPECT_EQ(read_file(run / "metrics.jsonl"), before);
}

TEST_F(Training, patience_ends_a_curriculum_that_no_longer_grows) {
  const json changes = {{"data", {{"kind", "word_problem"}, {"group", "z60"}, {"curriculum_start", 1}, {"curriculum_threshold", 0.5}}},
                        {"train", {{"learning_rate", 1e-9}, {"tokens", 3}, {"steps", 50}, {"checkpoint_every", 3}, {"patience", 7}}}};
  EXPECT_EQ(train(recipe(changes), folder_ / "run").step, 7);
  const json record = json::parse(read_file(folder_ / "run" / "run.json"));
  EXPECT_EQ(record.at("status"), "finished");
  EXPECT_TRUE(record.at("gave_up"));
  EXPECT_FALSE(record.at("mastered"));
  EXPECT_EQ(train(recipe(changes), folder_ / "run", {.resume = true}).step, 7);
}

TEST_F(Training, patience_needs_a_curriculum) {
  const std::string message = error_of([&] { train(recipe({{"train", {{"patience", 5}}}}), folder_ / "run"); });
  EXPECT_NE(message.find("train.patience waits for a curriculum"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(folder_ / "run" / "run.json"));
}

TEST_F(Training, T02_in_bfloat16) { expect_exact_continuation({{"train", {{"precision", "bf16"}}}}, 12, 6); }

// 5 batches an epoch: stops in the middle of epoch 2, at the end of epoch 1, and at the very last step.
TEST_F(Training, T06_epochs_go_on_where_they_were) {
  const json changes = text(3, 500);
  for (int64_t stop : {7, 5}) expect_exact_continuation(changes, 15, stop);
  const std::string before = read_file(folder_ / "straight/metrics.jsonl");
  json same = changes;
  same["train"] = {{"steps", 15}, {"checkpoint_every", 5}};
  EXPECT_EQ(train(recipe(same), folder_ / "straight", {.resume = true}).step, 15);
  EXPECT_EQ(read_file(folder_ / "straight/metrics.jsonl"), before);
}

TEST_F(Training, T07_other_data_are_refused) {
  const json changes = text(4, 300);
  const fs::path run = folder_ / "run", files = folder_ / "text";
  train(recipe(changes), run);
  json longer = changes;
  longer["train"]["steps"] = 14;
  const auto resume = [&](const json& values) { return error_of([&] { train(recipe(values), run, {.resume = true}); }); };

  const std::string original = read_file(files / "0.txt");
  std::string changed = original;
  changed[100] ^= 1;
  write_file_atomically(files / "0.txt", changed);
  EXPECT_NE(resume(longer).find("the data are not those"), std::string::npos) << resume(longer);
  write_file_atomically(files / "0.txt", original);
  write_file_atomically(files / "extra.txt", original);
  write_file_atomically(files / "extra2.txt", original);
  write_file_atomically(files / "extra3.txt", original);
  EXPECT_NE(resume(longer).find("the data are not those"), std::string::npos) << resume(longer);
  EXPECT_EQ(train(recipe(longer), run, {.resume = true, .allow_changes = true}).step, 14);

  json shorter_rows = changes;
  shorter_rows["train"]["tokens"] = 16;
  EXPECT_NE(resume(shorter_rows).find("train.tokens was 32 in this run and is 16 now"), std::string::npos) << resume(shorter_rows);
}

TEST_F(Training, changed_recipe_is_refused_by_field) {
  const fs::path run = folder_ / "run";
  train(recipe(), run);
  const auto resume = [&](const json& values) { return error_of([&] { train(recipe(values), run, {.resume = true}); }); };
  EXPECT_NE(resume({{"train", {{"learning_rate", 0.5}}}}).find("train.learning_rate was \"not given\" in this run and is 0.5 now"),
            std::string::npos);
  EXPECT_NE(resume({{"model", {{"kind", "rope"}}}}).find("rope"), std::string::npos);
  EXPECT_EQ(resume({{"train", {{"steps", 13}, {"checkpoint_every", 1}, {"log_every", 2}}}}), "");
  EXPECT_NE(resume({{"train", {{"lerning_rate", 0.5}}}}).find("train.learning_rate"), std::string::npos);
}

TEST_F(Training, used_folder_is_refused_and_resume_starts_a_run) {
  write_file_atomically(folder_ / "notes/mine.txt", "kept");
  EXPECT_NE(error_of([&] { train(recipe(), folder_ / "notes"); }).find("not empty"), std::string::npos);
  EXPECT_EQ(train(recipe(), folder_ / "run", {.resume = true}).step, 12);
  EXPECT_NE(error_of([&] { train(recipe(), folder_ / "run"); }).find("--resume"), std::string::npos);
  EXPECT_EQ(json::parse(read_file(folder_ / "run/run.json")).at("status"), "finished");
}

TEST_F(Training, one_process_at_a_time_trains_in_a_folder) {
  const fs::path run = folder_ / "run";
  train(recipe(), run);
  {
    const RunLock other(run);
    for (const bool resume : {false, true})
      EXPECT_NE(error_of([&] {
                  train(recipe({{"train", {{"steps", 14}}}}), run, {.resume = resume});
                }).find("another process is training in"),
                std::string::npos);
  }
  EXPECT_EQ(train(recipe({{"train", {{"steps", 14}}}}), run, {.resume = true}).step, 14);
}

TEST_F(Training, damaged_record_is_named) {
  const fs::path run = folder_ / "run";
  for (const char* damaged : {"", "{\"status\": ", "[]", "{}"}) {
    write_file_atomically(run / "run.json", damaged);
    EXPECT_NE(error_of([&] { recipe_of_run(run); }).find((run / "run.json").string()), std::string::npos) << damaged;
  }
}

TEST_F(Training, files_of_others_in_a_checkpoint_do_not_matter) {
  const fs::path run = folder_ / "run", last = run / "checkpoints/step-000012";
  train(recipe(), run);
  write_file_atomically(last / "notes/evaluation.json", "{}");
  write_file_atomically(last / "evaluation.json", "{}");
  EXPECT_EQ(newest_checkpoint(run)->folder, last);
}

TEST_F(Training, T08_damaged_checkpoints_are_passed_over) {
  const fs::path run = folder_ / "run", last = run / "checkpoints/step-000012";
  const auto newest = [&] { return newest_checkpoint(run)->folder.filename().string(); };
  for (const char* name : {"model.safetensors", "trainer.safetensors", "trainer.json", "config.json", "checksums.json"}) {
    fs::remove_all(run);
    train(recipe(), run);
    EXPECT_EQ(newest(), "step-000012");
    const std::string bytes = read_file(last / name);
    write_file_atomically(last / name, bytes.substr(0, bytes.size() / 2));
    EXPECT_EQ(newest(), "step-000006") << "half " << name;
    write_file_atomically(last / name, "");
    EXPECT_EQ(newest(), "step-000006") << "empty " << name;
    write_file_atomically(last / name, std::string(100'000, '['));
    EXPECT_EQ(newest(), "step-000006") << "deep " << name;
    fs::remove(last / name);
    EXPECT_EQ(newest(), "step-000006") << "without " << name;
  }
  EXPECT_EQ(train(recipe(), run, {.resume = true}).step, 12);
  EXPECT_EQ(newest(), "step-000012");
  for (const char* step : {"step-000006", "step-000012"}) write_file_atomically(run / "checkpoints" / step / "trainer.json", "{}");
  EXPECT_NE(error_of(newest).find("whole"), std::string::npos);
}

TEST_F(Training, only_the_newest_checkpoints_are_kept) {
  train(recipe({{"train", {{"checkpoint_every", 1}, {"keep_checkpoints", 3}}}}), folder_ / "run");
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_ / "run/checkpoints")) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"step-000010", "step-000011", "step-000012"}));
}

TEST_F(Training, divergence_stops_and_says_what_to_do) {
  const json wild = {{"train", {{"learning_rate", 100}, {"weight_decay", 100}, {"warmup_steps", 0}, {"steps", 100}, {"checkpoint_every", 1}}}};
  const std::string message = error_of([&] { train(recipe(wild), folder_ / "run"); });
  EXPECT_NE(message.find("lower train.learning_rate"), std::string::npos) << message;
  EXPECT_TRUE(newest_checkpoint(folder_ / "run").has_value());
  EXPECT_NE(message.find(newest_checkpoint(folder_ / "run")->folder.string()), std::string::npos) << message;
}

// bfloat16 numbers near 1 are 0.0078 apart: norm weights kept in bfloat16 would never move at this learning rate.
TEST_F(Training, P31_norm_weights_move_in_bfloat16) {
  json changes = {{"model", {{"qk_norm", true}}},
                  {"train", {{"steps", 200}, {"learning_rate", 1e-4}, {"warmup_steps", 0}, {"final_learning_rate_fraction", 1}}}};
  std::map<std::string, at::Tensor> moved[2];
  for (int bf16 : {0, 1}) {
    changes["train"]["precision"] = bf16 ? "bf16" : "fp32";
    const fs::path run = folder_ / fmt::format("run{}", bf16);
    train(recipe(changes), run);
    const LanguageModel model = load_model(newest_checkpoint(run)->folder);
    for (const auto& [name, parameter] : model.named_parameters()) {
      if (name.find("norm") != std::string::npos) moved[bf16][name] = parameter.detach() - 1;
    }
  }
  EXPECT_GE(moved[0].size(), 5u);
  for (const auto& [name, movement] : moved[0]) {
    EXPECT_GT(moved[1].at(name).abs().max().item<double>(), 1e-3) << name;
    EXPECT_LT((moved[1].at(name) - movement).norm().item<double>(), 0.1 * movement.norm().item<double>()) << name;
  }
}

}  // namespace
}  // namespace pathattn
