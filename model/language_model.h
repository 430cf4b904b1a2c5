// A transformer over tokens: embedding; per layer x += attention(norm(x)), x += swiglu(norm(x)); norm; logits. docs/model.md has the equations.
//
// Shape suffixes in model/: B batch, T tokens, V vocabulary, E hidden_size, H heads (of queries, or of keys and values), D head_dim, C kv_dim.
// Tokens are int64 [B, T]. With cu_seqlens (int64 [documents + 1], B must be 1) row 0 holds packed documents that do not see each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/attention.h"
#include "model/config.h"

namespace pathattn {

// What sequences keep between calls, one entry a layer.
struct LanguageState {
  int64_t sequences = 0, capacity = 0;
  std::vector<AttentionState> layers;
};

class LanguageModel {
 public:
  // Random parameters, the same for every device: docs/model.md has the distribution. compute_type: float32, bfloat16 (float32 parameters and
  // residual stream, bfloat16 products; norms, beta and gates in float32) or float64 (parameters too).
  LanguageModel(ModelConfig config, uint64_t seed, at::ScalarType compute_type = at::kFloat, at::Device device = at::kCPU);
  // Given parameters, by name; exactly those of parameter_table(config), float32 (float64 when compute_type is), all on one device.
  LanguageModel(ModelConfig config, std::map<std::string, at::Tensor> parameters, at::ScalarType compute_type = at::kFloat);

  const ModelConfig& config() const { return config_; }
  at::Device device() const { return embedding_.device(); }  // calls take tokens on any device and give results on this one

  // Hugging Face names in the order of parameter_table(config): leaves that require gradients; write into them in place.
  const std::vector<std::pair<std::string, at::Tensor>>& named_parameters() const { return named_parameters_; }

  // Hidden states after the last norm [B, T, E]. Differentiable.
  at::Tensor hidden(const at::Tensor& tokens_BT, const std::optional<at::Tensor>& cu_seqlens = std::nullopt) const;
  // Hidden states [..., E] to logits [..., V], float32 (float64 when compute_type is).
  at::Tensor logits(const at::Tensor& hidden) const;
  at::Tensor forward(const at::Tensor& tokens_BT, const std::optional<at::Tensor>& cu_seqlens = std::nullopt) const {
    return logits(hidden(tokens_BT, cu_seqlens));
  }

  // forward() for tokens that check_tokens has passed, on device(): neither looks at them nor waits for the device, so that a CUDA graph may capture
  // it.
  at::Tensor forward_checked(const at::Tensor& tokens_BT, const std::optional<at::Tensor>& cu_seqlens = std::nullopt) const;

  // Error, beginning with `where`, that names the first token outside the vocabulary. All calls that take tokens make this check, but for
  // forward_checked.
  void check_tokens(const at::Tensor& tokens_BT, const std::string& where = "tokens") const;

  // Decoding, without gradients. Capacity counts tokens a sequence may reach.
  LanguageState empty_state(int64_t sequences, int64_t capacity) const;
  // Like hidden(); leaves document n (batch row n, or span n of cu_seqlens) in the empty `state` as sequence n.
  at::Tensor prefill(const at::Tensor& tokens_BT, const std::optional<at::Tensor>& cu_seqlens, LanguageState& state) const;
  // T more tokens for every sequence: tokens [sequences, T] to hidden states [sequences, T, E].
  at::Tensor step(const at::Tensor& tokens_BT, LanguageState& state) const;

 private:
  at::Tensor run(const at::Tensor& tokens_BT, const std::optional<at::Tensor>& cu_seqlens, LanguageState* state, Pass pass) const;

  struct Layer {
    at::Tensor attention_norm, mlp_norm, gate_proj, up_proj, down_proj;
    AttentionLayer attention;
  };
  ModelConfig config_;
  at::ScalarType compute_type_;
  std::vector<std::pair<std::string, at::Tensor>> named_parameters_;
  std::vector<Layer> layers_;
  at::Tensor embedding_, norm_, lm_head_;
};

// Error that names the first logit [B, T, V] that is infinite or not a number.
void check_logits(const at::Tensor& logits_BTV);

}  // namespace pathattn
