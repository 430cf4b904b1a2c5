#include "model/checkpoint.h"

#include <gtest/gtest.h>

#include "base/files.h"
#include "base/scratch_folder.h"
#include "model/tensor_file.h"
#include "model/test_models.h"

namespace pathattn {
namespace {

class Checkpoint : public testing::Test {
 protected:
  // The saved model's tensors.
  std::map<std::string, at::Tensor> save_small() {
    save_model(random_model(small_config(AttentionKind::kPath)), folder_);
    return load_tensors(folder_ / "model.safetensors");
  }
  std::string loading_error() {
    return error_of([&] { load_model(folder_); });
  }
  void write_index(const std::map<std::string, std::string>& files) {
    write_file_atomically(folder_ / "model.safetensors.index.json",
                          nlohmann::json({{"metadata", nlohmann::json::object()}, {"weight_map", files}}).dump());
  }

  const ScratchFolder scratch_;
  const std::filesystem::path folder_ = scratch_.path();
};

TEST_F(Checkpoint, loads_what_was_saved_bit_for_bit) {
  torch::NoGradGuard no_gradients;
  const at::Tensor tokens = random_tokens(2, 20, 50);
  for (const ModelConfig& config : small_configs()) {
    const LanguageModel model = random_model(config);
    save_model(model, folder_);
    const LanguageModel loaded = load_model(folder_);
    EXPECT_EQ(loaded.config(), config);
    for (size_t i = 0; i < model.named_parameters().size(); ++i)
      EXPECT_TRUE(torch::equal(loaded.named_parameters()[i].second, model.named_parameters()[i].second)) << model.named_parameters()[i].first;
    EXPECT_TRUE(torch::equal(loaded.forward(tokens), model.forward(tokens))) << describe(config);
  }
}

TEST_F(Checkpoint, H05_tied_embeddings_are_one_tensor) {
  ModelConfig config = small_config(AttentionKind::kPath);
  config.tie_word_embeddings = true;
  const LanguageModel model = random_model(config);
  save_model(model, folder_);
  EXPECT_FALSE(load_tensors(folder_ / "model.safetensors").contains("lm_head.weight"));
  const LanguageModel loaded = load_model(folder_);
  const at::Tensor tokens = random_tokens(1, 9, 50), hidden = loaded.hidden(tokens).detach(), embedding = loaded.named_parameters().front().second;
  EXPECT_LT(relative_error(loaded.logits(hidden).detach(), hidden.matmul(embedding.t()).detach()), 1e-6);
  loaded.forward(tokens).sum().backward();
  embedding.data().add_(embedding.grad(), -0.1);
  EXPECT_LT(relative_error(loaded.logits(hidden).detach(), hidden.matmul(embedding.t()).detach()), 1e-6);
  EXPECT_GT(embedding.grad().ne(0).all(1).sum().item<int64_t>(), 9);
}

TEST_F(Checkpoint, H07_missing_shards_are_listed) {
  save_small();
  std::map<std::string, std::string> files;
  for (int i = 0; i < 30; ++i) {
    const std::string name = fmt::format("model-{:05}-of-00030.safetensors", i + 1);
    files.emplace(fmt::format("tensor.{}", i), name);
    if (i % 2 == 0) save_tensors(folder_ / name, {{fmt::format("tensor.{}", i), torch::zeros({1})}});
  }
  write_index(files);
  const std::string message = loading_error();
  EXPECT_NE(message.find("15 of 30 files are missing"), std::string::npos) << message;
  for (int i = 1; i < 30; i += 2) EXPECT_NE(message.find(fmt::format("model-{:05}-of", i + 1)), std::string::npos) << message;
}

TEST_F(Checkpoint, H07_shards_load_and_a_stray_file_is_ignored) {
  const auto tensors = save_small();
  std::map<std::string, std::string> files;
  std::map<std::string, std::map<std::string, at::Tensor>> shards;
  for (const auto& [name, tensor] : tensors) {
    const std::string file = files.size() % 2 ? "model-00002-of-00002.safetensors" : "model-00001-of-00002.safetensors";
    files.emplace(name, file);
    shards[file].emplace(name, tensor);
  }
  for (const auto& [file, content] : shards) save_tensors(folder_ / file, content);
  write_index(files);
  save_tensors(folder_ / "model.safetensors", {{"stray", torch::zeros({1})}});
  const LanguageModel loaded = load_model(folder_);
  for (const auto& [name, tensor] : loaded.named_parameters()) EXPECT_TRUE(torch::equal(tensor, tensors.at(name))) << name;

  const std::string lost = shards.begin()->second.begin()->first;
  shards.begin()->second.erase(lost);
  save_tensors(folder_ / shards.begin()->first, shards.begin()->second);
  EXPECT_NE(loading_error().find(lost + " is not in model-00001-of-00002.safetensors"), std::string::npos) << loading_error();
}

TEST_F(Checkpoint, index_files_outside_the_folder_are_refused) {
  save_small();
  write_index({{"model.norm.weight", "../model.safetensors"}});
  EXPECT_NE(loading_error().find("must be the name of a file in the same folder"), std::string::npos) << loading_error();
}

TEST_F(Checkpoint, all_faults_of_names_shapes_and_types_come_in_one_error) {
  auto tensors = save_small();
  tensors.erase("model.norm.weight");
  tensors["lm_head.weight"] = torch::zeros({50, 31});
  tensors["model.layers.1.attn_norm.weight"] = torch::zeros({32}, torch::kLong);
  tensors["model.layers.7.attn_norm.weight"] = torch::zeros({32});
  save_tensors(folder_ / "model.safetensors", tensors);
  const std::string message = loading_error();
  for (const char* part : {"model.norm.weight is missing", "lm_head.weight has shape [50, 31], not [50, 32]",
                           "model.layers.1.attn_norm.weight has type I64, not F32", "model.layers.7.attn_norm.weight is unexpected"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST_F(Checkpoint, half_precision_weights_become_float32) {
  auto tensors = save_small();
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    std::map<std::string, at::Tensor> rounded;
    for (const auto& [name, tensor] : tensors) rounded.emplace(name, tensor.to(type));
    save_tensors(folder_ / "model.safetensors", rounded);
    const LanguageModel loaded = load_model(folder_);
    for (const auto& [name, tensor] : loaded.named_parameters()) EXPECT_TRUE(torch::equal(tensor, rounded.at(name).to(torch::kFloat))) << name;
  }
}

TEST_F(Checkpoint, missing_and_damaged_files) {
  EXPECT_NE(loading_error().find("config.json"), std::string::npos) << loading_error();
  write_file_atomically(folder_ / "config.json", "{\"model_type\": ");
  EXPECT_NE(loading_error().find("not valid JSON"), std::string::npos) << loading_error();
  write_file_atomically(folder_ / "config.json", small_config(AttentionKind::kNope).to_json().dump());
  EXPECT_NE(loading_error().find("neither model.safetensors nor"), std::string::npos) << loading_error();
  write_file_atomically(folder_ / "model.safetensors", "damaged");
  EXPECT_NE(loading_error().find("model.safetensors"), std::string::npos) << loading_error();
  write_file_atomically(folder_ / "model.safetensors.index.json", "[]");
  EXPECT_NE(loading_error().find("must hold a JSON object, not array"), std::string::npos) << loading_error();
  write_file_atomically(folder_ / "model.safetensors.index.json", "{}");
  EXPECT_NE(loading_error().find("weight_map is missing"), std::string::npos) << loading_error();
}

// Values that refusals would print: a recursive print of this depth overflows the stack.
TEST_F(Checkpoint, deeply_nested_json_is_refused) {
  const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
  save_small();
  const nlohmann::json config = nlohmann::json::parse(read_file(folder_ / "config.json"));
  for (const char* field : {"vocab_size", "hidden_act", "tie_word_embeddings", "model_type"}) {
    nlohmann::json changed = config;
    changed[field] = "HERE";
    std::string text = changed.dump();
    write_file_atomically(folder_ / "config.json", text.replace(text.find("\"HERE\""), 6, deep));
    EXPECT_NE(loading_error().find("nested more than"), std::string::npos) << loading_error().substr(0, 200);
  }
  write_file_atomically(folder_ / "config.json", config.dump());
  write_file_atomically(folder_ / "model.safetensors.index.json", "{\"weight_map\": {\"a\": " + deep + "}}");
  EXPECT_NE(loading_error().find("nested more than"), std::string::npos) << loading_error().substr(0, 200);
}

}  // namespace
}  // namespace pathattn
