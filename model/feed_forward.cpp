#include "model/feed_forward.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <torch/csrc/autograd/custom_function.h>

namespace pathattn {
namespace {

// silu(first half) * second half of the last dimension. The backward pass writes both halves' gradients into one tensor, without a concatenation.
class GatedSilu : public torch::autograd::Function<GatedSilu> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate_up) {
    context->save_for_backward({gate_up});
    const auto halves = gate_up.chunk(2, -1);
    return at::silu(halves[0]).mul_(halves[1]);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    const at::Tensor gate_up = context->get_saved_variables()[0];
    const auto halves = gate_up.chunk(2, -1);
    at::Tensor d_gate_up = at::empty_like(gate_up);
    auto d_halves = d_gate_up.chunk(2, -1);
    at::silu_out(d_halves[1], halves[0]);
    d_halves[1].mul_(gradients[0]);
    at::silu_backward_out(d_halves[0], gradients[0] * halves[1], halves[0]);
    return {d_gate_up};
  }
};

}  // namespace

at::Tensor feed_forward(const at::Tensor& x, const at::Tensor& gate_proj, const at::Tensor& up_proj, const at::Tensor& down_proj) {
  return at::linear(GatedSilu::apply(at::linear(x, at::cat({gate_proj, up_proj}))), down_proj);
}

}  // namespace pathattn
