#include "model/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include "model/rotary.h"
#include "model/row_norm.h"
#include "model/stick_breaking.h"
#include "operators/stick_breaking.h"

namespace pathattn {
namespace {

constexpr double kQkNormEps = 1e-5;

at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {}) {
  return at::linear(x, weight.to(x.scalar_type()), bias.defined() ? std::optional(bias.to(x.scalar_type())) : std::nullopt);
}

// Norm of each head in the weight's type: [head_dim] for all heads alike or [heads * head_dim].
at::Tensor norm_heads(const at::Tensor& x_BTHD, const at::Tensor& weight) {
  const int64_t head_dim = x_BTHD.size(-1);
  const at::Tensor rows = weight.numel() == head_dim ? weight : weight.view({x_BTHD.size(2), head_dim});
  return rms_norm(x_BTHD.to(weight.scalar_type()), rows, kQkNormEps).to(x_BTHD.scalar_type());
}

}  // namespace

AttentionLayer::AttentionLayer(const ModelConfig& config, const std::map<std::string, at::Tensor>& parameters, const std::string& prefix)
    : config_(config) {
  const auto find = [&](const char* name) {
    const auto found = parameters.find(prefix + name);
    return found == parameters.end() ? at::Tensor() : found->second;
  };
  q_proj_ = find("q_proj.weight"), k_proj_ = find("k_proj.weight"), v_proj_ = find("v_proj.weight"), o_proj_ = find("o_proj.weight");
  q_bias_ = find("q_proj.bias"), k_bias_ = find("k_proj.bias"), v_bias_ = find("v_proj.bias");
  if (config.has_w()) {
    w_proj_ = find("w_proj.weight"), w_proj_down_ = find("w_proj.0.weight"), w_proj_up_ = find("w_proj.1.weight");
    conv_weight_ = find("w_conv1d.weight"), conv_bias_ = find("w_conv1d.bias");
    beta_proj_ = find("bt_proj.weight"), beta_bias_ = find("bt_proj.bias");
    gate_proj_ = find("g_proj.weight"), gate_bias_ = find("g_proj.bias");
    q_norm_ = find("maybe_q_norm.weight"), k_norm_ = find("maybe_k_norm.weight");
  } else if (config.kind == AttentionKind::kFox) {
    gate_proj_ = find("f_proj.weight"), gate_bias_ = find("f_proj.bias"), output_gate_proj_ = find("g_proj.weight");
    q_norm_ = find("q_norm.weight"), k_norm_ = find("k_norm.weight");
  }
}

at::Tensor AttentionLayer::forward(const at::Tensor& x_BTE, const Call& call, AttentionState* state) const {
  const int64_t batch = x_BTE.size(0), tokens = x_BTE.size(1), head_dim = config_.head_dim();
  const at::Tensor x = x_BTE.to(call.compute_type);
  at::Tensor q_BTHD = project(x, q_proj_, q_bias_).view({batch, tokens, config_.num_heads, head_dim});
  at::Tensor k_BTHD = project(x, k_proj_, k_bias_).view({batch, tokens, config_.num_kv_heads, head_dim});
  const at::Tensor v_BTHD = project(x, v_proj_, v_bias_).view({batch, tokens, config_.num_kv_heads, head_dim});
  if (q_norm_.defined()) {
    q_BTHD = norm_heads(q_BTHD, q_norm_);
    k_BTHD = norm_heads(k_BTHD, k_norm_);
  }
  if (call.rotation_cos.defined()) {
    q_BTHD = rotate(q_BTHD, call.rotation_cos, call.rotation_sin);
    k_BTHD = rotate(k_BTHD, call.rotation_cos, call.rotation_sin);
  }
  std::optional<at::Tensor> w_BTHD, beta_BTH, g_BTH;
  if (config_.has_w()) {
    w_BTHD = w_of(x, call, state);
    beta_BTH = 2 * at::sigmoid(project(x_BTE, beta_proj_, beta_bias_));
  }
  if (config_.has_gate()) g_BTH = at::log_sigmoid(project(x_BTE, gate_proj_, gate_bias_));
  at::Tensor o_BTE = attend(q_BTHD, k_BTHD, v_BTHD, w_BTHD, beta_BTH, g_BTH, call, state).reshape({batch, tokens, config_.hidden_size});
  if (output_gate_proj_.defined()) o_BTE = o_BTE * at::sigmoid(project(x, output_gate_proj_));
  return project(o_BTE, o_proj_);
}

at::Tensor AttentionLayer::w_of(const at::Tensor& x_BTE, const Call& call, AttentionState* state) const {
  const at::Tensor projected = w_proj_.defined() ? project(x_BTE, w_proj_) : project(project(x_BTE, w_proj_down_), w_proj_up_);
  at::Tensor w_BTC = projected.to(beta_proj_.scalar_type());
  const int64_t batch = w_BTC.size(0), tokens = w_BTC.size(1), width = w_BTC.size(2);
  if (config_.w_conv) {
    const int64_t gap = config_.conv_size - 1;
    at::Tensor spaced;
    if (call.packing) {
      spaced = w_BTC.new_zeros({batch, call.packing->spaced_length, width}).index_copy(1, call.packing->spaced_rows, w_BTC);
    } else {
      spaced = at::cat({call.pass == Pass::kDecode ? state->conv_inputs : w_BTC.new_zeros({batch, gap, width}), w_BTC}, 1);
    }
    if (state) {
      state->conv_inputs = call.packing ? spaced.index_select(1, call.packing->last_rows).view({call.packing->num_documents, gap, width})
                                        : spaced.narrow(1, tokens, gap).contiguous();
    }
    const std::optional<at::Tensor> bias = conv_bias_.defined() ? std::optional(conv_bias_) : std::nullopt;
    at::Tensor convolved = at::conv1d(spaced.transpose(1, 2), conv_weight_, bias, 1, at::IntArrayRef{0}, 1, width).transpose(1, 2);
    if (call.packing) convolved = convolved.index_select(1, call.packing->spaced_rows - gap);
    w_BTC = at::silu(convolved);
  }
  return unit_norm(w_BTC.reshape({batch, tokens, config_.num_kv_heads, config_.head_dim()}));
}

at::Tensor AttentionLayer::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& w,
                                  const std::optional<at::Tensor>& beta, const std::optional<at::Tensor>& g, const Call& call,
                                  AttentionState* state) const {
  const std::optional<at::Tensor> cu_seqlens = call.packing ? std::optional(call.packing->cu_seqlens) : std::nullopt;
  if (config_.kind == AttentionKind::kSba) {
    if (call.pass == Pass::kPrefill) return stick_breaking_prefill(q, k, v, call.packing, state->attention);
    if (call.pass == Pass::kDecode) return stick_breaking_decode(q, k, v, state->attention);
    return std::get<0>(stick_breaking_attention(q, k, v, {}, cu_seqlens));
  }
  if (call.pass == Pass::kPrefill) return prefill(q, k, v, w, beta, g, {}, cu_seqlens, config_.gate_scaled, state->attention);
  if (call.pass == Pass::kDecode) return decode(q, k, v, w, beta, g, {}, config_.gate_scaled, state->attention);
  if (w || g || cu_seqlens) return std::get<0>(path_attention(q, k, v, w, beta, g, {}, cu_seqlens, config_.gate_scaled));
  const bool grouped = config_.num_heads != config_.num_kv_heads;
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0, true, {}, grouped).transpose(1, 2);
}

}  // namespace pathattn
