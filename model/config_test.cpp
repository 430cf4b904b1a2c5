#include "model/config.h"

#include <gtest/gtest.h>

#include "base/error_of.h"
#include "base/files.h"
#include "model/parameters.h"

namespace pathattn {
namespace {

using nlohmann::json;

json golden_config(const std::string& model) {
  return json::parse(read_file(std::string(PATHATTN_SOURCE_DIR) + "/tests/golden/" + model + "/config.json"));
}

json with(json config, const std::string& key, json value) {
  config[key] = std::move(value);
  return config;
}

std::string error_of(const json& config) {
  return pathattn::error_of([&] { ModelConfig::from_json(config, "config.json"); });
}

TEST(ModelConfig, reads_the_golden_configurations) {
  const ModelConfig path = ModelConfig::from_json(golden_config("model_path"), "");
  EXPECT_EQ(path.kind, AttentionKind::kPath);
  EXPECT_EQ(path.intermediate_size, 256);
  EXPECT_EQ(path.num_kv_heads, 4);
  EXPECT_EQ(path.bos_token_id, 1);
  EXPECT_EQ(ModelConfig::from_json(golden_config("model_path_gate"), "").kind, AttentionKind::kPathFox);
  EXPECT_FALSE(ModelConfig::from_json(golden_config("model_path_gqa_fullw_qknorm"), "").low_rank_w);
  const ModelConfig fox = ModelConfig::from_json(golden_config("model_fox"), "");
  EXPECT_EQ(fox.kind, AttentionKind::kFox);
  EXPECT_TRUE(fox.qk_norm && fox.qkv_bias && fox.output_gate);
}

TEST(ModelConfig, what_is_written_reads_back_the_same) {
  for (const char* model : {"model_path", "model_path_gate", "model_path_gqa_fullw_qknorm", "model_fox"}) {
    const ModelConfig config = ModelConfig::from_json(golden_config(model), "");
    EXPECT_EQ(ModelConfig::from_json(config.to_json(), ""), config) << model;
  }
  ModelConfig rope = ModelConfig::from_json(golden_config("model_path"), "");
  rope.kind = AttentionKind::kRope;
  rope.rope_theta = 500000;
  EXPECT_EQ(rope.to_json()["model_type"], "llama");
  EXPECT_EQ(ModelConfig::from_json(rope.to_json(), ""), rope);
}

TEST(ModelConfig, gate_convention_is_in_the_model_file) {
  const json published = golden_config("model_path_gate");
  EXPECT_TRUE(ModelConfig::from_json(published, "").gate_scaled);
  EXPECT_FALSE(ModelConfig::from_json(with(published, "gate_scaled", false), "").gate_scaled);
  EXPECT_FALSE(ModelConfig::from_json(golden_config("model_fox"), "").gate_scaled);
  EXPECT_NE(error_of(with(golden_config("model_fox"), "gate_scaled", true)).find("gate_scaled = true is not supported"), std::string::npos);

  ModelConfig config = ModelConfig::from_json(published, "");
  EXPECT_EQ(config.to_json()["model_type"], "path_attn");
  EXPECT_EQ(config.to_json()["gate_scaled"], true);
  config.gate_scaled = false;
  EXPECT_EQ(config.to_json()["model_type"], "pathattn");
  EXPECT_EQ(ModelConfig::from_json(config.to_json(), ""), config);
  json without = config.to_json();
  without.erase("gate_scaled");
  EXPECT_NE(error_of(without).find("gate_scaled is missing"), std::string::npos);
}

TEST(ModelConfig, what_the_public_package_would_misread_has_another_type) {
  ModelConfig config = ModelConfig::from_json(golden_config("model_path"), "");
  EXPECT_EQ(config.to_json()["model_type"], "path_attn");
  config.conv_size = 4;
  EXPECT_EQ(config.to_json()["model_type"], "pathattn");
  config.kind = AttentionKind::kNope;
  EXPECT_EQ(config.to_json()["model_type"], "pathattn");
}

TEST(ModelConfig, errors_name_file_field_and_value) {
  const json path = golden_config("model_path");
  const std::pair<json, const char*> cases[] = {
      {json::array(), "must be a JSON object"},
      {json::object(), "model_type is missing"},
      {with(path, "model_type", "gpt2"), "\"gpt2\" is unknown, supported are path_attn, forgetting_transformer, llama and pathattn"},
      {with(path, "model_type", 3), "model_type is 3"},
      {with(path, "hidden_size", nullptr), "hidden_size is missing"},
      {with(path, "hidden_size", "64"), "hidden_size is \"64\""},
      {with(path, "hidden_size", 64.5), "hidden_size is 64.5"},
      {with(path, "hidden_size", -64), "hidden_size is -64"},
      {with(path, "hidden_size", 18446744073709551615u), "hidden_size is 18446744073709551615"},
      {with(path, "hidden_size", 66), "66 is not a multiple of the 4 heads"},
      {with(path, "hidden_size", 4096), "heads of width 1024, at most 256"},
      {with(path, "num_kv_heads", 3), "4 heads are not a multiple of the 3"},
      {with(path, "norm_eps", 0), "norm_eps is 0"},
      {with(path, "norm_eps", 1e308), "norm_eps is 1e+308, it must be a positive number, at most 1"},
      {with(path, "norm_eps", 4'600'000'000'000'000'000), "norm_eps is 4600000000000000000"},
      {with(path, "rope_scaling", {{"type", "linear"}}), "rope_scaling = {\"type\":\"linear\"} is not supported"},
      {with(path, "attention_bias", true), "attention_bias = true is not supported"},
      {with(path, "mlp_bias", true), "mlp_bias = true is not supported"},
      {with(path, "head_dim", 32), "head_dim = 32 is not supported, only 16 is"},
      {with(path, "tie_word_embeddings", "no"), "tie_word_embeddings is \"no\""},
      {with(path, "hidden_act", "gelu"), "hidden_act = \"gelu\" is not supported"},
      {with(path, "elementwise_affine", false), "elementwise_affine = false is not supported"},
      {with(path, "eos_token_id", 97), "token 97 is outside the vocabulary of 97"},
      {with(path, "conv_size", 0), "conv_size is 0"},
      {with(golden_config("model_fox"), "window_size", 128), "window_size = 128 is not supported"},
      {with(path, "model_type", "pathattn"), "attention is missing"},
  };
  for (const auto& [config, part] : cases) {
    const std::string message = error_of(config);
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_EQ(message.find("config.json: "), 0u) << message;
  }
}

TEST(ModelConfig, llama_options_we_do_not_have_are_refused) {
  ModelConfig rope = ModelConfig::from_json(golden_config("model_path"), "");
  rope.kind = AttentionKind::kRope;
  const json llama = rope.to_json();
  EXPECT_NE(error_of(with(llama, "rope_scaling", {{"type", "linear"}})).find("rope_scaling"), std::string::npos);
  EXPECT_NE(error_of(with(llama, "rope_parameters", {{"rope_type", "yarn"}})).find("rope_type = \"yarn\""), std::string::npos);
  EXPECT_NE(error_of(with(llama, "rope_theta", 1e17)).find("rope_theta is 1e+17"), std::string::npos);
  EXPECT_NE(error_of(with(llama, "attention_bias", true)).find("attention_bias"), std::string::npos);
  EXPECT_NE(error_of(with(llama, "head_dim", 32)).find("head_dim = 32 is not supported, only 16"), std::string::npos);
  const json newer = with(llama, "rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e6}});
  EXPECT_EQ(ModelConfig::from_json(newer, "").rope_theta, 1e6);
}

TEST(ModelConfig, from_a_recipe) {
  Recipe recipe = Recipe::from_json({{"model", {{"kind", "path_fox"}, {"hidden_size", 64}, {"num_heads", 2}, {"num_layers", 1}}}}, "recipe");
  const ModelConfig config = model_config_from_recipe(recipe, 256);
  recipe.refuse_unread();
  EXPECT_EQ(config.kind, AttentionKind::kPathFox);
  EXPECT_EQ(config.num_kv_heads, 2);
  EXPECT_EQ(config.intermediate_size, 256);
  EXPECT_FALSE(config.gate_scaled);
  Recipe misfit = Recipe::from_json({{"model", {{"hidden_size", 65}}}}, "recipe");
  EXPECT_THROW(model_config_from_recipe(misfit, 256), Error);
  Recipe other_kind = Recipe::from_json({{"model", {{"kind", "rope"}, {"gate_scaled", true}}}}, "recipe");
  model_config_from_recipe(other_kind, 256);
  EXPECT_THROW(other_kind.refuse_unread(), Error);
}

TEST(ModelConfig, counts_parameters) {
  EXPECT_EQ(num_parameters(ModelConfig::from_json(golden_config("model_path_gate"), "")),
            2 * 97 * 64 + 64 + 2 * (2 * 64 + 4 * 64 * 64 + 2 * 32 * 64 + 64 * 3 + 2 * (2 * 64 + 2) + 3 * 40 * 64));
}

}  // namespace
}  // namespace pathattn
