// Runs of a tiny model: resuming changes no bit, other data and recipes are refused, damaged checkpoints are passed over, divergence is reported.
#include "train/train.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <fstream>
#include <map>
#include <set>

#include "base/error_of.h"
#include "base/files.h"
#include "base/scratch_folder.h"
#include "model/checkpoint.h"
#include "train/checkpoint.h"
#include "train/metrics.h"
#include "train/run_folder.h"
#include "train/tiny_recipe.h"

namespace pathattn {
namespace {
namespace fs = std::filesystem;
using nlohmann::json;

class Training : public testing::Test {
 protected:
  // Text of `num_files` files of `size` bytes, as a change to tiny_recipe().
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
    train(tiny_recipe(changes), straight);
    train(tiny_recipe(changes), stopped);
    for (const auto& checkpoint : fs::directory_iterator(stopped / "checkpoints")) {
      if (checkpoint.path().filename() != fmt::format("step-{:06}", stop)) fs::remove_all(checkpoint);
    }
    EXPECT_EQ(train(tiny_recipe(changes), stopped, {.resume = true}).step, steps);
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
  Recipe values = tiny_recipe({{"train", {{"learning_rate", 2.0}, {"steps", 18}, {"warmup_steps", 8}, {"final_learning_rate_fraction", 0.25}}}});
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
  const int64_t step = train(tiny_recipe(changes), run).step;
  EXPECT_LT(step, 500);
  const json record = json::parse(read_file(run / "run.json"));
  EXPECT_EQ(record.at("status"), "finished");
  EXPECT_TRUE(record.at("mastered"));
  EXPECT_EQ(logged(run).back().at(0), step);
  EXPECT_EQ(logged(run).back().at(4), 3);
  const std::string before = read_file(run / "metrics.jsonl");
  EXPECT_EQ(train(tiny_recipe(changes), run, {.resume = true}).step, step);
  EXPECT_EQ(read_file(run / "metrics.jsonl"), before);
}

TEST_F(Training, patience_ends_a_curriculum_that_no_longer_grows) {
  const json changes = {{"data", {{"kind", "word_problem"}, {"group", "z60"}, {"curriculum_start", 1}, {"curriculum_threshold", 0.5}}},
                        {"train", {{"learning_rate", 1e-9}, {"tokens", 3}, {"steps", 50}, {"checkpoint_every", 3}, {"patience", 7}}}};
  EXPECT_EQ(train(tiny_recipe(changes), folder_ / "run").step, 7);
  const json record = json::parse(read_file(folder_ / "run" / "run.json"));
  EXPECT_EQ(record.at("status"), "finished");
  EXPECT_TRUE(record.at("gave_up"));
  EXPECT_FALSE(record.at("mastered"));
  EXPECT_EQ(train(tiny_recipe(changes), folder_ / "run", {.resume = true}).step, 7);
}

TEST_F(Training, patience_needs_a_curriculum) {
  const std::string message = error_of([&] { train(tiny_recipe({{"train", {{"patience", 5}}}}), folder_ / "run"); });
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
  EXPECT_EQ(train(tiny_recipe(same), folder_ / "straight", {.resume = true}).step, 15);
  EXPECT_EQ(read_file(folder_ / "straight/metrics.jsonl"), before);
}

TEST_F(Training, T07_other_data_are_refused) {
  const json changes = text(4, 300);
  const fs::path run = folder_ / "run", files = folder_ / "text";
  train(tiny_recipe(changes), run);
  json longer = changes;
  longer["train"]["steps"] = 14;
  const auto resume = [&](const json& values) { return error_of([&] { train(tiny_recipe(values), run, {.resume = true}); }); };

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
  EXPECT_EQ(train(tiny_recipe(longer), run, {.resume = true, .allow_changes = true}).step, 14);

  json shorter_rows = changes;
  shorter_rows["train"]["tokens"] = 16;
  EXPECT_NE(resume(shorter_rows).find("train.tokens was 32 in this run and is 16 now"), std::string::npos) << resume(shorter_rows);
}

TEST_F(Training, changed_recipe_is_refused_by_field) {
  const fs::path run = folder_ / "run";
  train(tiny_recipe(), run);
  const auto resume = [&](const json& values) { return error_of([&] { train(tiny_recipe(values), run, {.resume = true}); }); };
  EXPECT_NE(resume({{"train", {{"learning_rate", 0.5}}}}).find("train.learning_rate was not given in this run and is 0.5 now"), std::string::npos);
  EXPECT_NE(resume({{"model", {{"kind", "rope"}}}}).find("rope"), std::string::npos);
  EXPECT_EQ(resume({{"train", {{"steps", 13}, {"checkpoint_every", 1}, {"log_every", 2}}}}), "");
  EXPECT_NE(resume({{"train", {{"lerning_rate", 0.5}}}}).find("train.learning_rate"), std::string::npos);
}

TEST_F(Training, used_folder_is_refused_and_resume_starts_a_run) {
  write_file_atomically(folder_ / "notes/mine.txt", "kept");
  EXPECT_NE(error_of([&] { train(tiny_recipe(), folder_ / "notes"); }).find("not empty"), std::string::npos);
  EXPECT_EQ(train(tiny_recipe(), folder_ / "run", {.resume = true}).step, 12);
  EXPECT_NE(error_of([&] { train(tiny_recipe(), folder_ / "run"); }).find("--resume"), std::string::npos);
  EXPECT_EQ(json::parse(read_file(folder_ / "run/run.json")).at("status"), "finished");
}

TEST_F(Training, one_process_at_a_time_trains_in_a_folder) {
  const fs::path run = folder_ / "run";
  train(tiny_recipe(), run);
  {
    const RunLock other(run);
    for (const bool resume : {false, true})
      EXPECT_NE(error_of([&] {
                  train(tiny_recipe({{"train", {{"steps", 14}}}}), run, {.resume = resume});
                }).find("another process is training in"),
                std::string::npos);
  }
  EXPECT_EQ(train(tiny_recipe({{"train", {{"steps", 14}}}}), run, {.resume = true}).step, 14);
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
  train(tiny_recipe(), run);
  write_file_atomically(last / "notes/evaluation.json", "{}");
  write_file_atomically(last / "evaluation.json", "{}");
  EXPECT_EQ(newest_checkpoint(run)->folder, last);
}

TEST_F(Training, T08_damaged_checkpoints_are_passed_over) {
  const fs::path run = folder_ / "run", last = run / "checkpoints/step-000012";
  const auto newest = [&] { return newest_checkpoint(run)->folder.filename().string(); };
  for (const char* name : {"model.safetensors", "trainer.safetensors", "trainer.json", "config.json", "checksums.json"}) {
    fs::remove_all(run);
    train(tiny_recipe(), run);
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
  EXPECT_EQ(train(tiny_recipe(), run, {.resume = true}).step, 12);
  EXPECT_EQ(newest(), "step-000012");
  for (const char* step : {"step-000006", "step-000012"}) write_file_atomically(run / "checkpoints" / step / "trainer.json", "{}");
  EXPECT_NE(error_of(newest).find("whole"), std::string::npos);
}

TEST_F(Training, only_the_newest_checkpoints_are_kept) {
  train(tiny_recipe({{"train", {{"checkpoint_every", 1}, {"keep_checkpoints", 3}}}}), folder_ / "run");
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_ / "run/checkpoints")) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"step-000010", "step-000011", "step-000012"}));
}

TEST_F(Training, divergence_stops_and_says_what_to_do) {
  const json wild = {{"train", {{"learning_rate", 100}, {"weight_decay", 100}, {"warmup_steps", 0}, {"steps", 100}, {"checkpoint_every", 1}}}};
  const std::string message = error_of([&] { train(tiny_recipe(wild), folder_ / "run"); });
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
    train(tiny_recipe(changes), run);
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
