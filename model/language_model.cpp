#include "model/language_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>

#include <fmt/ranges.h>

#include <cmath>

#include "base/error.h"
#include "model/parameters.h"
#include "model/rotary.h"
#include "model/row_norm.h"

namespace pathattn {
namespace {

constexpr double kStartDeviation = 0.02;

at::ScalarType parameter_type(at::ScalarType compute_type) { return compute_type == at::kDouble ? at::kDouble : at::kFloat; }

std::map<std::string, at::Tensor> random_parameters(const ModelConfig& config, uint64_t seed, at::ScalarType type, at::Device device) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::map<std::string, at::Tensor> parameters;
  for (const ParameterEntry& entry : parameter_table(config)) {
    at::Tensor tensor = at::empty(entry.shape, type);
    switch (entry.start) {
      case Start::kNormal:
        tensor.normal_(0, kStartDeviation, generator);
        break;
      case Start::kZeros:
        tensor.zero_();
        break;
      case Start::kOnes:
        tensor.fill_(1);
        break;
    }
    parameters.emplace(entry.name, tensor.to(device));
  }
  return parameters;
}

void check_room(const LanguageState& state, int64_t sequences, int64_t new_tokens) {
  if (sequences != state.sequences) fail("the state holds {} sequences, tokens were given for {}", state.sequences, sequences);
  const int64_t longest = state.layers[0].attention.lengths.max().item<int64_t>();
  if (longest + new_tokens > state.capacity)
    fail("{} more tokens after {} do not fit into a state with room for {}", new_tokens, longest, state.capacity);
}

}  // namespace

LanguageModel::LanguageModel(ModelConfig config, uint64_t seed, at::ScalarType compute_type, at::Device device)
    : LanguageModel(config, random_parameters(config, seed, parameter_type(compute_type), device), compute_type) {}

LanguageModel::LanguageModel(ModelConfig config, std::map<std::string, at::Tensor> parameters, at::ScalarType compute_type)
    : config_(std::move(config)), compute_type_(compute_type) {
  if (compute_type != at::kFloat && compute_type != at::kBFloat16 && compute_type != at::kDouble)
    fail("a model computes in float32, bfloat16 or float64, not in {}", c10::toString(compute_type));
  const std::vector<ParameterEntry> table = parameter_table(config_);
  for (const ParameterEntry& entry : table) {
    const auto found = parameters.find(entry.name);
    if (found == parameters.end()) fail("the parameter {} is missing", entry.name);
    const at::Tensor& tensor = found->second;
    if (tensor.sizes() != at::IntArrayRef(entry.shape) || tensor.scalar_type() != parameter_type(compute_type))
      fail("the parameter {} must be {} of shape [{}]", entry.name, c10::toString(parameter_type(compute_type)), fmt::join(entry.shape, ", "));
    named_parameters_.emplace_back(entry.name, tensor.set_requires_grad(true));
  }
  if (parameters.size() != table.size()) fail("{} parameters were given, the model has {}", parameters.size(), table.size());

  // The table's order: embedding, then per layer norm, attention, norm, mlp, then the last norm and lm_head.
  embedding_ = named_parameters_.front().second;
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const LayerNames names = layer_names(config_, i);
    layers_.push_back({parameters.at(names.attention_norm), parameters.at(names.mlp_norm), parameters.at(names.mlp + "gate_proj.weight"),
                       parameters.at(names.mlp + "up_proj.weight"), parameters.at(names.mlp + "down_proj.weight"),
                       AttentionLayer(config_, parameters, names.attention)});
  }
  norm_ = parameters.at("model.norm.weight");
  lm_head_ = config_.tie_word_embeddings ? embedding_ : parameters.at("lm_head.weight");
}

void LanguageModel::check_tokens(const at::Tensor& tokens, const std::string& where) const {
  if (tokens.dim() != 2 || tokens.scalar_type() != at::kLong) fail("{} must be int64 of shape [batch, tokens]", where);
  if (tokens.numel() == 0) return;
  const auto [low, high] = tokens.aminmax();
  if (low.item<int64_t>() >= 0 && high.item<int64_t>() < config_.vocabulary_size) return;
  const at::Tensor wrong = tokens.lt(0).logical_or_(tokens.ge(config_.vocabulary_size)).nonzero()[0];
  const int64_t row = wrong[0].item<int64_t>(), column = wrong[1].item<int64_t>();
  fail("{}: token {} at position {} of row {} is outside the vocabulary of {}", where, tokens[row][column].item<int64_t>(), column, row,
       config_.vocabulary_size);
}

at::Tensor LanguageModel::run(const at::Tensor& tokens_BT, const std::optional<at::Tensor>& cu_seqlens, LanguageState* state, Pass pass) const {
  if (cu_seqlens && tokens_BT.size(0) != 1) fail("packed documents are one row of tokens, these are {} rows", tokens_BT.size(0));
  Call call{pass, compute_type_, {}, {}, {}};
  if (cu_seqlens) call.packing.emplace(*cu_seqlens, tokens_BT.size(1), config_.has_w() && config_.w_conv ? config_.conv_size - 1 : 0, device());
  if (config_.kind == AttentionKind::kRope) {
    at::Tensor positions_BT = call.packing ? call.packing->positions.unsqueeze(0) : at::arange(tokens_BT.size(1), device()).unsqueeze(0);
    if (pass == Pass::kDecode) positions_BT = positions_BT + state->layers[0].attention.lengths.unsqueeze(1);
    std::tie(call.rotation_cos, call.rotation_sin) = rotation_at(positions_BT, config_.head_dim(), config_.rope_theta, parameter_type(compute_type_));
  }
  const auto weight = [&](const at::Tensor& parameter) { return parameter.to(compute_type_); };
  at::Tensor x_BTE = at::embedding(embedding_, tokens_BT.to(device()));
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    x_BTE = x_BTE + layer.attention.forward(rms_norm(x_BTE, layer.attention_norm, config_.norm_eps), call, state ? &state->layers[i] : nullptr);
    const at::Tensor normed = rms_norm(x_BTE, layer.mlp_norm, config_.norm_eps).to(compute_type_);
    const at::Tensor gated = at::silu(at::linear(normed, weight(layer.gate_proj))) * at::linear(normed, weight(layer.up_proj));
    x_BTE = x_BTE + at::linear(gated, weight(layer.down_proj));
  }
  return rms_norm(x_BTE, norm_, config_.norm_eps);
}

at::Tensor LanguageModel::hidden(const at::Tensor& tokens_BT, const std::optional<at::Tensor>& cu_seqlens) const {
  check_tokens(tokens_BT);
  return run(tokens_BT, cu_seqlens, nullptr, Pass::kForward);
}

at::Tensor LanguageModel::forward_checked(const at::Tensor& tokens_BT, const std::optional<at::Tensor>& cu_seqlens) const {
  return logits(run(tokens_BT, cu_seqlens, nullptr, Pass::kForward));
}

at::Tensor LanguageModel::logits(const at::Tensor& hidden) const {
  return at::linear(hidden.to(compute_type_), lm_head_.to(compute_type_)).to(parameter_type(compute_type_));
}

LanguageState LanguageModel::empty_state(int64_t sequences, int64_t capacity) const {
  if (sequences < 1 || capacity < 1) fail("a state needs at least one sequence and one token of room, not {} and {}", sequences, capacity);
  LanguageState state{sequences, capacity, {}};
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    AttentionState layer{DecodingTensors::create(sequences, capacity, config_.num_heads, config_.num_kv_heads, config_.head_dim(), config_.head_dim(),
                                                 compute_type_, config_.has_w(), config_.has_gate(), device()),
                         {}};
    if (config_.has_w() && config_.w_conv)
      layer.conv_inputs = at::zeros({sequences, config_.conv_size - 1, config_.kv_dim()}, embedding_.options().requires_grad(false));
    state.layers.push_back(std::move(layer));
  }
  return state;
}

at::Tensor LanguageModel::prefill(const at::Tensor& tokens_BT, const std::optional<at::Tensor>& cu_seqlens, LanguageState& state) const {
  at::NoGradGuard no_gradients;
  check_tokens(tokens_BT);
  const at::Tensor lengths = cu_seqlens ? cu_seqlens->diff() : at::full({tokens_BT.size(0)}, tokens_BT.size(1));
  check_room(state, lengths.numel(), lengths.numel() == 0 ? 0 : lengths.max().item<int64_t>());
  if (state.layers[0].attention.lengths.any().item<bool>()) fail("a prefill needs an empty state");
  return run(tokens_BT, cu_seqlens, &state, Pass::kPrefill);
}

at::Tensor LanguageModel::step(const at::Tensor& tokens_BT, LanguageState& state) const {
  at::NoGradGuard no_gradients;
  check_tokens(tokens_BT);
  check_room(state, tokens_BT.size(0), tokens_BT.size(1));
  return run(tokens_BT, std::nullopt, &state, Pass::kDecode);
}

void check_logits(const at::Tensor& logits_BTV) {
  if (std::isfinite(logits_BTV.sum().item<double>())) return;
  const at::Tensor wrong = logits_BTV.isfinite().logical_not_().nonzero().cpu();
  if (wrong.size(0) == 0) return;
  const int64_t row = wrong[0][0].item<int64_t>(), position = wrong[0][1].item<int64_t>(), token = wrong[0][2].item<int64_t>();
  fail("the logit of token {} at position {} is not a number but {}: the model's weights are damaged or its training diverged", token, position,
       logits_BTV[row][position][token].item<double>());
}

}  // namespace pathattn
