// What the program does with a model on a CUDA device against the same on the CPU: values, gradients, training, resuming, evaluating, generating.
// Without a device every test is skipped, and counted.
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <fstream>

#include "base/error.h"
#include "base/files.h"
#include "evaluate/bits_by_position.h"
#include "evaluate/task_metrics.h"
#include "generate/generate.h"
#include "model/device.h"
#include "model/tensor_file.h"
#include "model/test_models.h"
#include "train/loss.h"
#include "train/optimizer.h"
#include "train/step.h"
#include "train/train.h"

namespace pathattn {
namespace {
namespace fs = std::filesystem;
using nlohmann::json;

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (torch::cuda::device_count() == 0) GTEST_SKIP() << "no CUDA device";
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  static LanguageModel copy_on(const LanguageModel& model, const char* device, at::ScalarType compute_type = at::kFloat) {
    std::map<std::string, at::Tensor> parameters;
    for (const auto& [name, tensor] : model.named_parameters())
      parameters.emplace(name, tensor.detach().to(parse_device(device), at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    return LanguageModel(model.config(), parameters, compute_type);
  }

  // Logits, then the gradients of a weighted sum of them, on the CPU.
  static std::vector<at::Tensor> results(const LanguageModel& model, const at::Tensor& tokens, const std::optional<at::Tensor>& cu_seqlens) {
    const at::Tensor logits = model.forward(tokens, cu_seqlens);
    torch::manual_seed(5);
    (logits * torch::randn(logits.sizes()).to(logits.device())).sum().backward();
    std::vector<at::Tensor> all = {logits.detach().cpu()};
    for (const auto& [name, tensor] : model.named_parameters()) {
      all.push_back(tensor.grad().cpu());
      tensor.mutable_grad().reset();
    }
    return all;
  }

  Recipe recipe(const std::string& kind, const json& changes = json::object()) const {
    json values = {{"model", {{"kind", kind}, {"hidden_size", 32}, {"num_layers", 2}, {"num_heads", 2}, {"intermediate_size", 64}}},
                   {"data", {{"kind", "flip_flop"}}},
                   {"train",
                    {{"batch_size", 8},
                     {"tokens", 64},
                     {"steps", 12},
                     {"warmup_steps", 4},
                     {"learning_rate", 3e-3},
                     {"checkpoint_every", 6},
                     {"validate_every", 6},
                     {"validation_batches", 1},
                     {"accumulation", 2}}}};
    values.merge_patch(changes);
    return Recipe::from_json(values, "tiny");
  }

  std::vector<double> losses(const std::string& run) const {
    std::vector<double> losses;
    std::ifstream file(folder_ / run / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const json values = json::parse(line);
      losses.push_back(values.contains("loss") ? values.at("loss") : values.at("validation_loss"));
    }
    return losses;
  }

  std::string last_model(const std::string& run) const { return read_file(folder_ / run / "checkpoints" / "step-000012" / "model.safetensors"); }

  const fs::path folder_ = fs::path(testing::TempDir()) / fmt::format("pathattn_cuda_test_{}", ::getpid());
};

TEST_F(Cuda, models_give_the_cpus_logits_and_gradients) {
  const at::Tensor rows = random_tokens(2, 90, 50), packed = random_tokens(1, 90, 50), ends = torch::tensor({0, 0, 1, 3, 3, 40, 90});
  for (const ModelConfig& config : small_configs()) {
    const LanguageModel exact = random_model(config, 1, at::kDouble);
    const LanguageModel cpu = copy_on(exact, "cpu"), cuda = copy_on(exact, "cuda"), narrow = copy_on(exact, "cuda", at::kBFloat16);
    for (const bool is_packed : {false, true}) {
      const at::Tensor& tokens = is_packed ? packed : rows;
      const std::optional<at::Tensor> cu_seqlens = is_packed ? std::optional(ends) : std::nullopt;
      const auto expected = results(cpu, tokens, cu_seqlens), actual = results(cuda, tokens, cu_seqlens);
      const auto in_bf16 = results(narrow, tokens, cu_seqlens);
      for (size_t i = 0; i < expected.size(); ++i) {
        const std::string what = fmt::format("{}, packed {}, result {}", describe(config), is_packed, i);
        EXPECT_LT((actual[i] - expected[i]).norm().item<double>(), 1e-4 * expected[i].norm().item<double>() + 1e-5) << what;
      }
      EXPECT_LT(relative_error(in_bf16[0], expected[0]), 3e-2) << describe(config);
    }
  }
}

TEST_F(Cuda, training_follows_the_cpus) {
  for (const char* kind : {"path", "path_fox", "fox", "sba", "rope", "nope"}) {
    train(recipe(kind), folder_ / "cpu");
    train(recipe(kind), folder_ / "cuda", {.device = "cuda"});
    train(recipe(kind, {{"train", {{"precision", "bf16"}, {"device", "cuda"}}}}), folder_ / "bf16");
    const auto expected = losses("cpu"), actual = losses("cuda"), in_bf16 = losses("bf16");
    ASSERT_EQ(actual.size(), expected.size());
    ASSERT_EQ(in_bf16.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(actual[i], expected[i], 1e-3 * expected[i]) << kind << i;
      EXPECT_NEAR(in_bf16[i], expected[i], 3e-2 * expected[i]) << kind << i;
    }
    const json record = json::parse(read_file(folder_ / "bf16" / "run.json"));
    EXPECT_EQ(record.at("device"), "cuda");
    for (const char* file : {"model.safetensors", "trainer.safetensors"}) {
      const auto saved = load_tensors(folder_ / "bf16" / "checkpoints" / "step-000012" / file);
      for (const auto& [name, tensor] : saved) EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
    }
    for (const char* run : {"cpu", "cuda", "bf16"}) fs::remove_all(folder_ / run);
  }
}

// A shape of batches is captured the second time that it comes; the third ends one graph and begins another, as a curriculum does.
TEST_F(Cuda, captured_steps_are_those_of_the_eager_one_bit_for_bit) {
  for (const char* kind : {"path", "path_fox", "fox", "sba"}) {
    Recipe values = recipe(kind, {{"train", {{"precision", "bf16"}, {"accumulation", 1}}}});
    const TrainSettings settings = TrainSettings::read(values);
    const ModelConfig config = model_config_from_recipe(values, 5);
    const at::Device device = parse_device("cuda");
    const LanguageModel eager(config, 1, at::kBFloat16, device), captured(config, 1, at::kBFloat16, device);
    AdamW eager_optimizer(eager, settings), captured_optimizer(captured, settings);
    TrainingStep step(captured, captured_optimizer, 1);
    torch::manual_seed(3);
    for (const int64_t tokens : {30, 30, 30, 30, 31, 31, 31, 32}) {
      const Batch batch{torch::randint(0, 5, {8, tokens}), torch::randint(0, 5, {8, tokens}), {}};
      const StepResult result = step(batch, 3e-3);
      const BatchResult expected = accumulate_gradients(eager, eager_optimizer, {batch.tokens.to(device), batch.targets.to(device), {}}, 1);
      const double norm = eager_optimizer.clip_gradients().item<double>();
      eager_optimizer.step(at::scalar_tensor(3e-3, at::TensorOptions(at::kFloat).device(device)), at::ones({}, device));
      EXPECT_EQ(result.loss, expected.loss.item<double>()) << kind << tokens;
      EXPECT_EQ(result.accuracy, expected.accuracy.item<double>()) << kind << tokens;
      EXPECT_EQ(result.last_accuracy, expected.last_accuracy.item<double>()) << kind << tokens;
      EXPECT_EQ(result.gradient_norm, norm) << kind << tokens;
      for (size_t i = 0; i < eager.named_parameters().size(); ++i)
        EXPECT_TRUE(at::equal(eager.named_parameters()[i].second, captured.named_parameters()[i].second))
            << kind << tokens << eager.named_parameters()[i].first;
    }
  }
}

TEST_F(Cuda, resuming_changes_no_bit_and_a_run_moves_between_devices) {
  const Recipe bf16 = recipe("path_fox", {{"train", {{"precision", "bf16"}}}});
  for (const char* run : {"straight", "stopped", "moved"}) train(bf16, folder_ / run, {.device = "cuda"});
  EXPECT_EQ(last_model("straight"), last_model("stopped"));
  const std::string whole = last_model("straight");
  for (const char* run : {"stopped", "moved"}) fs::remove_all(folder_ / run / "checkpoints" / "step-000012");
  train(bf16, folder_ / "stopped", {.resume = true, .device = "cuda"});
  EXPECT_EQ(last_model("stopped"), whole);
  train(bf16, folder_ / "moved", {.resume = true});
  const auto here = losses("moved"), there = losses("straight");
  ASSERT_EQ(here.size(), there.size());
  for (size_t i = 0; i < here.size(); ++i) EXPECT_NEAR(here[i], there[i], 2e-2 * there[i]) << i;
}

TEST_F(Cuda, evaluation_and_generation_follow_the_cpus) {
  for (ModelConfig config : small_configs()) {
    config.vocabulary_size = 256;
    const LanguageModel cpu = random_model(config), cuda = copy_on(cpu, "cuda");
    const at::Tensor tokens = random_tokens(5, 65, 256);
    const Batch windows{tokens.narrow(1, 0, 64), tokens.narrow(1, 1, 64), {}};
    const auto expected = evaluate_bits_by_position(cpu, windows, {0, 32, 64}), actual = evaluate_bits_by_position(cuda, windows, {0, 32, 64});
    for (const char* range : {"0-32", "32-64"})
      EXPECT_NEAR(actual.at(range).get<double>(), expected.at(range).get<double>(), 1e-3) << describe(config);
    EXPECT_LE(std::abs(count_errors(cuda, windows).wrong - count_errors(cpu, windows).wrong), 1) << describe(config);

    GenerateOptions greedy{.max_new_tokens = 20};
    greedy.sampling.temperature = 0;
    const std::vector<std::vector<int64_t>> prompts = {{1, 2, 3}, {200}, std::vector<int64_t>(70, 9)};
    EXPECT_EQ(generate(cuda, prompts, greedy), generate(cpu, prompts, greedy)) << describe(config);
  }
}

TEST_F(Cuda, devices_that_are_not_there_are_refused) {
  const auto refusal = [](const std::string& name) { return error_of([&] { parse_device(name); }); };
  const auto count = torch::cuda::device_count();
  EXPECT_EQ(parse_device("cuda"), at::Device(at::kCUDA, 0));
  EXPECT_EQ(parse_device(fmt::format("cuda:{}", count - 1)), at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(count - 1)));
  EXPECT_NE(refusal(fmt::format("cuda:{}", count)).find("this machine has"), std::string::npos);
  for (const char* name : {"gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1x", ""})
    EXPECT_NE(refusal(name).find("there is no device"), std::string::npos);
}

}  // namespace
}  // namespace pathattn
