#include "model/parameters.h"

#include <functional>
#include <numeric>

#include <fmt/format.h>

namespace pathattn {
namespace {

constexpr int64_t kLowRank = 32;

class Table {
 public:
  void matrix(const std::string& name, int64_t out, int64_t in) { add(name + ".weight", {out, in}, Start::kNormal, true); }
  // Projection of the log gate: without decay, which would pull every gate towards 1/2.
  void gate(const std::string& name, int64_t num_heads, int64_t in) {
    add(name + ".weight", {num_heads, in}, Start::kNormal, false);
    bias(name, num_heads);
  }
  void bias(const std::string& name, int64_t size) { add(name + ".bias", {size}, Start::kZeros, false); }
  void norm(const std::string& name, int64_t size) { add(name, {size}, Start::kOnes, false); }
  void add(std::string name, std::vector<int64_t> shape, Start start, bool weight_decay) {
    entries.push_back({std::move(name), std::move(shape), start, weight_decay});
  }
  std::vector<ParameterEntry> entries;
};

void add_path(const ModelConfig& c, const std::string& prefix, Table& table) {
  if (c.low_rank_w) {
    table.matrix(prefix + "w_proj.0", kLowRank, c.hidden_size);
    table.matrix(prefix + "w_proj.1", c.kv_dim(), kLowRank);
  } else {
    table.matrix(prefix + "w_proj", c.kv_dim(), c.hidden_size);
  }
  if (c.w_conv) {
    table.add(prefix + "w_conv1d.weight", {c.kv_dim(), 1, c.conv_size}, Start::kNormal, true);
    if (c.conv_bias) table.bias(prefix + "w_conv1d", c.kv_dim());
  }
  table.matrix(prefix + "bt_proj", c.num_kv_heads, c.hidden_size);
  table.bias(prefix + "bt_proj", c.num_kv_heads);
  if (c.has_gate()) table.gate(prefix + "g_proj", c.num_heads, c.hidden_size);
  if (c.qk_norm) {
    table.norm(prefix + "maybe_q_norm.weight", c.head_dim());
    table.norm(prefix + "maybe_k_norm.weight", c.head_dim());
  }
}

void add_fox(const ModelConfig& c, const std::string& prefix, Table& table) {
  table.gate(prefix + "f_proj", c.num_heads, c.hidden_size);
  if (c.qk_norm) {
    table.norm(prefix + "q_norm.weight", c.hidden_size);
    table.norm(prefix + "k_norm.weight", c.kv_dim());
  }
  if (c.output_gate) table.matrix(prefix + "g_proj", c.hidden_size, c.hidden_size);
}

}  // namespace

LayerNames layer_names(const ModelConfig& config, int64_t layer) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const bool llama = config.kind == AttentionKind::kRope;
  return {prefix + (llama ? "self_attn." : "attn."), prefix + "mlp.", prefix + (llama ? "input_layernorm" : "attn_norm") + ".weight",
          prefix + (llama ? "post_attention_layernorm" : "mlp_norm") + ".weight"};
}

std::vector<ParameterEntry> parameter_table(const ModelConfig& c) {
  Table table;
  table.matrix(c.kind == AttentionKind::kRope ? "model.embed_tokens" : "model.embeddings", c.vocabulary_size, c.hidden_size);
  for (int64_t layer = 0; layer < c.num_layers; ++layer) {
    const auto [attention, mlp, attention_norm, mlp_norm] = layer_names(c, layer);
    table.norm(attention_norm, c.hidden_size);
    const std::pair<const char*, int64_t> projections[] = {{"q_proj", c.hidden_size}, {"k_proj", c.kv_dim()}, {"v_proj", c.kv_dim()}};
    for (const auto& [name, width] : projections) {
      table.matrix(attention + name, width, c.hidden_size);
      if (c.qkv_bias) table.bias(attention + name, width);
    }
    table.matrix(attention + "o_proj", c.hidden_size, c.hidden_size);
    if (c.has_w()) add_path(c, attention, table);
    if (c.kind == AttentionKind::kFox) add_fox(c, attention, table);
    table.norm(mlp_norm, c.hidden_size);
    table.matrix(mlp + "gate_proj", c.intermediate_size, c.hidden_size);
    table.matrix(mlp + "up_proj", c.intermediate_size, c.hidden_size);
    table.matrix(mlp + "down_proj", c.hidden_size, c.intermediate_size);
  }
  table.norm("model.norm.weight", c.hidden_size);
  if (!c.tie_word_embeddings) table.matrix("lm_head", c.vocabulary_size, c.hidden_size);
  return table.entries;
}

int64_t num_parameters(const ModelConfig& config) {
  int64_t total = 0;
  for (const ParameterEntry& entry : parameter_table(config))
    total += std::accumulate(entry.shape.begin(), entry.shape.end(), int64_t{1}, std::multiplies<>());
  return total;
}

}  // namespace pathattn
