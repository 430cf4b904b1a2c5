// One attention layer of any kind: projections, what w, beta and the gate are made from, the operator, the output projection.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "model/config.h"
#include "model/packing.h"
#include "operators/path_attention.h"

namespace pathattn {

// What a layer keeps of its sequences between calls.
struct AttentionState {
  DecodingTensors attention;
  at::Tensor conv_inputs;  // [sequences, conv_size - 1, C]: the convolution's last inputs, zeros before a document; undefined without one
};

enum class Pass { kForward, kPrefill, kDecode };

// What all layers of one call share.
struct Call {
  Pass pass = Pass::kForward;
  at::ScalarType compute_type = at::kFloat;
  std::optional<Packing> packing;         // if the documents are packed
  at::Tensor rotation_cos, rotation_sin;  // [B or 1, T, 1, D/2]; undefined unless the kind is rope
};

class AttentionLayer {
 public:
  // Takes the parameters whose names start with `prefix`.
  AttentionLayer(const ModelConfig& config, const std::map<std::string, at::Tensor>& parameters, const std::string& prefix);

  // x: normed hidden states [B, T, E] in the parameters' type; the result has compute_type. `state` is null in Pass::kForward.
  at::Tensor forward(const at::Tensor& x_BTE, const Call& call, AttentionState* state) const;

 private:
  at::Tensor attend(const at::Tensor& q_BTHD, const at::Tensor& k_BTHD, const at::Tensor& v_BTHD, const std::optional<at::Tensor>& w_BTHD,
                    const std::optional<at::Tensor>& beta_BTH, const std::optional<at::Tensor>& g_BTH, const Call& call, AttentionState* state) const;
  at::Tensor w_of(const at::Tensor& x_BTE, const Call& call, AttentionState* state) const;

  ModelConfig config_;
  at::Tensor q_proj_, k_proj_, v_proj_, o_proj_, q_bias_, k_bias_, v_bias_, q_norm_, k_norm_;
  at::Tensor w_proj_down_, w_proj_up_, w_proj_, conv_weight_, conv_bias_, beta_proj_, beta_bias_;  // w_proj_ alone if w has full rank
  at::Tensor gate_proj_, gate_bias_, output_gate_proj_;
};

}  // namespace pathattn
