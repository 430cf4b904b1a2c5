// Derivatives of the operators: the attentions have one, their backwards refuse a second, decoding has none.
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "operators/schema.h"

namespace pathattn::operators {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Gradients call_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                        const OptionalTensor& g, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o, const OptionalTensor& d_lse,
                        std::optional<double> scale, const OptionalTensor& cu_seqlens, bool gate_scaled, const OptionalTensor& o_rest) {
  static const auto op = dispatched<PathAttentionBackwardSignature>("pathattn::path_attention_backward");
  return op.call(q, k, v, w, beta, g, o, lse, d_o, d_lse, scale, cu_seqlens, gate_scaled, o_rest);
}

class PathAttention : public torch::autograd::Function<PathAttention> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                               const OptionalTensor& beta, const OptionalTensor& g, std::optional<double> scale, const OptionalTensor& cu_seqlens,
                               bool gate_scaled, bool keeps_rest) {
    static const auto op = dispatched<PathAttentionSignature>("pathattn::path_attention");
    static const auto op_with_rest = dispatched<PathAttentionWithRestSignature>("pathattn::path_attention_with_rest");
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor o, lse, o_rest;
    if (keeps_rest)
      std::tie(o, lse, o_rest) = op_with_rest.call(q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled);
    else
      std::tie(o, lse) = op.call(q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled);
    context->set_materialize_grads(false);
    context->save_for_backward({q, k, v, w.value_or(at::Tensor()), beta.value_or(at::Tensor()), g.value_or(at::Tensor()),
                                cu_seqlens.value_or(at::Tensor()), o, lse, o_rest});
    context->saved_data["scale"] = scale;
    context->saved_data["gate_scaled"] = gate_scaled;
    return {o, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list result(10);  // one for each argument of forward
    if (!gradients[0].defined() && !gradients[1].defined()) return result;
    const variable_list saved = context->get_saved_variables();
    const auto optional = [](const at::Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; };
    const at::Tensor &o = saved[7], &lse = saved[8];
    const at::Tensor d_o = gradients[0].defined() ? gradients[0] : at::zeros_like(o);
    auto [dq, dk, dv, dw, dbeta, dg] = call_backward(saved[0], saved[1], saved[2], optional(saved[3]), optional(saved[4]), optional(saved[5]), o, lse,
                                                     d_o, optional(gradients[1]), context->saved_data["scale"].toOptional<double>(),
                                                     optional(saved[6]), context->saved_data["gate_scaled"].toBool(), optional(saved[9]));
    result[0] = dq, result[1] = dk, result[2] = dv;
    if (saved[3].defined()) result[3] = dw, result[4] = dbeta;
    if (saved[5].defined()) result[5] = dg;
    return result;
  }
};

class PathAttentionBackward : public torch::autograd::Function<PathAttentionBackward> {
 public:
  static variable_list forward(AutogradContext*, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                               const OptionalTensor& beta, const OptionalTensor& g, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o,
                               const OptionalTensor& d_lse, std::optional<double> scale, const OptionalTensor& cu_seqlens, bool gate_scaled,
                               const OptionalTensor& o_rest) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dq, dk, dv, dw, dbeta, dg] = call_backward(q, k, v, w, beta, g, o, lse, d_o, d_lse, scale, cu_seqlens, gate_scaled, o_rest);
    return {dq, dk, dv, dw, dbeta, dg};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "pathattn::path_attention can be differentiated once: its gradients have no derivative");
  }
};

std::tuple<at::Tensor, at::Tensor> path_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w,
                                                  const OptionalTensor& beta, const OptionalTensor& g, std::optional<double> scale,
                                                  const OptionalTensor& cu_seqlens, bool gate_scaled) {
  const bool keeps_rest =
      q.is_cuda() && at::isReducedFloatingType(q.scalar_type()) && g && g->defined() && torch::autograd::compute_requires_grad(q, k, v, w, beta, g);
  const variable_list results = PathAttention::apply(q, k, v, w, beta, g, scale, cu_seqlens, gate_scaled, keeps_rest);
  return {results[0], results[1]};
}

Gradients path_attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& w, const OptionalTensor& beta,
                                  const OptionalTensor& g, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o,
                                  const OptionalTensor& d_lse, std::optional<double> scale, const OptionalTensor& cu_seqlens, bool gate_scaled,
                                  const OptionalTensor& o_rest) {
  const variable_list results = PathAttentionBackward::apply(q, k, v, w, beta, g, o, lse, d_o, d_lse, scale, cu_seqlens, gate_scaled, o_rest);
  return {results[0], results[1], results[2], results[3], results[4], results[5]};
}

using StickBreakingGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of q, k, v

StickBreakingGradients call_stick_breaking_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& d_o,
                                                    const OptionalTensor& d_rest, std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  static const auto op = dispatched<StickBreakingBackwardSignature>("pathattn::stick_breaking_attention_backward");
  return op.call(q, k, v, d_o, d_rest, scale, cu_seqlens);
}

class StickBreaking : public torch::autograd::Function<StickBreaking> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::optional<double> scale,
                               const OptionalTensor& cu_seqlens) {
    static const auto op = dispatched<StickBreakingSignature>("pathattn::stick_breaking_attention");
    at::AutoDispatchBelowADInplaceOrView below;
    auto [o, rest] = op.call(q, k, v, scale, cu_seqlens);
    context->set_materialize_grads(false);
    context->save_for_backward({q, k, v, cu_seqlens.value_or(at::Tensor())});
    context->saved_data["scale"] = scale;
    return {o, rest};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list result(5);  // one for each argument of forward
    if (!gradients[0].defined() && !gradients[1].defined()) return result;
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const auto optional = [](const at::Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; };
    const at::Tensor d_o =
        gradients[0].defined() ? gradients[0] : at::zeros_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)}, q.options());
    std::tie(result[0], result[1], result[2]) =
        call_stick_breaking_backward(q, k, v, d_o, optional(gradients[1]), context->saved_data["scale"].toOptional<double>(), optional(saved[3]));
    return result;
  }
};

class StickBreakingBackward : public torch::autograd::Function<StickBreakingBackward> {
 public:
  static variable_list forward(AutogradContext*, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& d_o,
                               const OptionalTensor& d_rest, std::optional<double> scale, const OptionalTensor& cu_seqlens) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dq, dk, dv] = call_stick_breaking_backward(q, k, v, d_o, d_rest, scale, cu_seqlens);
    return {dq, dk, dv};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "pathattn::stick_breaking_attention can be differentiated once: its gradients have no derivative");
  }
};

std::tuple<at::Tensor, at::Tensor> stick_breaking_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                            std::optional<double> scale, const OptionalTensor& cu_seqlens) {
  const variable_list results = StickBreaking::apply(q, k, v, scale, cu_seqlens);
  return {results[0], results[1]};
}

StickBreakingGradients stick_breaking_attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& d_o,
                                                         const OptionalTensor& d_rest, std::optional<double> scale,
                                                         const OptionalTensor& cu_seqlens) {
  const variable_list results = StickBreakingBackward::apply(q, k, v, d_o, d_rest, scale, cu_seqlens);
  return {results[0], results[1], results[2]};
}

// For operators without a derivative: refuses inputs that want one, rather than cutting the graph silently.
void refuse_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (at::GradMode::is_enabled()) {
    for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
      TORCH_CHECK(!argument.isTensor() || !argument.toTensor().requires_grad(), op.schema().name(),
                  " has no derivative: call it under torch.no_grad(), or use pathattn::path_attention");
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(pathattn, Autograd, m) {
  m.impl("path_attention", path_attention);
  m.impl("path_attention_backward", path_attention_backward);
  m.impl("stick_breaking_attention", stick_breaking_attention);
  m.impl("stick_breaking_attention_backward", stick_breaking_attention_backward);
  for (const char* name : {"path_attention_with_rest", "prefill", "decode", "carried_keys"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_gradient>());
}

}  // namespace pathattn::operators
