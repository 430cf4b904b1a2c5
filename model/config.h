// What a model is made of, and its two written forms: a Hugging Face config.json and the [model] section of a recipe. docs/model.md has the layers,
// docs/file-formats.md the fields.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/recipe.h"

namespace pathattn {

enum class AttentionKind { kPath, kPathFox, kFox, kSba, kRope, kNope };

const char* name_of(AttentionKind kind);                // "path", "path_fox", "fox", "sba", "rope", "nope"
AttentionKind attention_kind(const std::string& name);  // Error lists the kinds

struct ModelConfig {
  AttentionKind kind = AttentionKind::kPath;
  int64_t vocabulary_size = 0, hidden_size = 0, num_layers = 0;
  int64_t num_heads = 0, num_kv_heads = 0;  // num_heads a multiple of num_kv_heads
  int64_t intermediate_size = 0;            // of the SwiGLU
  double norm_eps = 1e-6;                   // of the layers' norms; norms of queries and keys have 1e-5
  bool tie_word_embeddings = false;         // logits with the embedding matrix; no lm_head

  bool qk_norm = false;    // path, path_fox, fox
  bool low_rank_w = true;  // path, path_fox: w through rank 32, otherwise one matrix
  bool w_conv = true;      // path, path_fox: causal convolution and SiLU on w
  int64_t conv_size = 3;
  bool conv_bias = false;
  bool gate_scaled = false;                    // path_fox: the gate's sum is multiplied by head_dim^-1/2 too
  bool qkv_bias = false, output_gate = false;  // fox
  double rope_theta = 10000;                   // rope

  std::optional<int64_t> bos_token_id, eos_token_id;

  int64_t head_dim() const { return hidden_size / num_heads; }
  int64_t kv_dim() const { return num_kv_heads * head_dim(); }
  bool has_w() const { return kind == AttentionKind::kPath || kind == AttentionKind::kPathFox; }
  bool has_gate() const { return kind == AttentionKind::kPathFox || kind == AttentionKind::kFox; }

  // `where` names the file in errors. An unknown model_type, a missing, wrong or contradictory field or an option we do not have is an Error.
  static ModelConfig from_json(const nlohmann::json& json, const std::string& where);
  // model_type path_attn, forgetting_transformer or llama where the owner of that type computes the same function, otherwise pathattn.
  nlohmann::json to_json() const;

  void check(const std::string& where) const;  // Error if sizes do not fit together
  bool operator==(const ModelConfig&) const = default;
};

// The public package's default: 2/3 * ratio * hidden_size, rounded up to a multiple of 256.
int64_t default_intermediate_size(int64_t hidden_size, int64_t hidden_ratio = 4);

// Reads [model] kind, hidden_size, num_layers, num_heads, num_kv_heads (0: num_heads), intermediate_size (0: the default), norm_eps,
// tie_word_embeddings and the options of that kind: qk_norm, low_rank_w, w_conv, conv_size, conv_bias, gate_scaled, qkv_bias, output_gate,
// rope_theta.
ModelConfig model_config_from_recipe(Recipe& recipe, int64_t vocabulary_size);

}  // namespace pathattn
