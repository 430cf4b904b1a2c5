// Small models and measures for tests.
#pragma once

#include <torch/types.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/error_of.h"
#include "model/language_model.h"

namespace pathattn {

inline const std::filesystem::path kGolden = std::filesystem::path(PATHATTN_SOURCE_DIR) / "tests" / "golden";

inline ModelConfig small_config(AttentionKind kind) {
  ModelConfig config;
  config.kind = kind;
  config.vocabulary_size = 50;
  config.hidden_size = 32;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.intermediate_size = 48;
  return config;
}

// One model of each kind, then those with the options that the kinds have.
inline std::vector<ModelConfig> small_configs() {
  std::vector<ModelConfig> configs;
  for (const auto kind :
       {AttentionKind::kPath, AttentionKind::kPathFox, AttentionKind::kFox, AttentionKind::kSba, AttentionKind::kRope, AttentionKind::kNope})
    configs.push_back(small_config(kind));
  ModelConfig path = small_config(AttentionKind::kPathFox);
  path.qk_norm = path.conv_bias = path.gate_scaled = true;
  path.low_rank_w = false;
  path.conv_size = 4;
  configs.push_back(path);
  ModelConfig path_without_conv = small_config(AttentionKind::kPath);
  path_without_conv.w_conv = false;
  path_without_conv.tie_word_embeddings = true;
  configs.push_back(path_without_conv);
  ModelConfig fox = small_config(AttentionKind::kFox);
  fox.qk_norm = fox.qkv_bias = fox.output_gate = true;
  configs.push_back(fox);
  return configs;
}

inline std::string describe(const ModelConfig& config) { return config.to_json().dump(); }

// Parameters far from their starting values (norms that are not 1, biases that are not 0), so that a mistake in any of them shows.
inline LanguageModel random_model(const ModelConfig& config, uint64_t seed = 1, at::ScalarType compute_type = at::kFloat) {
  LanguageModel model(config, seed, compute_type);
  torch::NoGradGuard no_gradients;
  torch::manual_seed(seed);
  for (const auto& [name, tensor] : model.named_parameters()) tensor.add_(torch::randn_like(tensor), 0.2);
  return model;
}

inline at::Tensor random_tokens(int64_t batch, int64_t tokens, int64_t vocabulary, uint64_t seed = 7) {
  torch::manual_seed(seed);
  return torch::randint(vocabulary, {batch, tokens}, torch::kLong);
}

inline double relative_error(const at::Tensor& value, const at::Tensor& reference) {
  const at::Tensor expected = reference.to(torch::kDouble);
  return (value.to(torch::kDouble) - expected).norm().item<double>() / expected.norm().item<double>();
}

// Mean cross entropy of each row's tokens 1 ... T-1.
inline at::Tensor next_token_loss(const at::Tensor& logits_BTV, const at::Tensor& tokens_BT) {
  const int64_t tokens = tokens_BT.size(1);
  return torch::cross_entropy_loss(logits_BTV.narrow(1, 0, tokens - 1).flatten(0, 1), tokens_BT.narrow(1, 1, tokens - 1).flatten());
}

}  // namespace pathattn
