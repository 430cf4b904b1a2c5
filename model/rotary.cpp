#include "model/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <torch/csrc/autograd/custom_function.h>

namespace pathattn {
namespace {

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, double direction) {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor first = x.narrow(-1, 0, half), second = x.narrow(-1, half, half);
  at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  at::Tensor y_first = y.narrow(-1, 0, half), y_second = y.narrow(-1, half, half);
  at::mul_out(y_first, first, cosine);
  y_first.addcmul_(second, sine, -direction);
  at::mul_out(y_second, second, cosine);
  y_second.addcmul_(first, sine, direction);
  return y;
}

class Rotate : public torch::autograd::Function<Rotate> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine) {
    context->save_for_backward({cosine, sine});
    return rotated(x, cosine, sine, 1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {rotated(gradients[0], saved[0], saved[1], -1), {}, {}};
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> rotation_at(const at::Tensor& positions_BT, int64_t head_dim, double theta, at::ScalarType type) {
  const at::Tensor exponents = at::arange(0, head_dim, 2, positions_BT.options().dtype(at::kDouble)) / static_cast<double>(-head_dim);
  const at::Tensor angles = positions_BT.to(at::kDouble).unsqueeze(-1).unsqueeze(-1) * at::pow(theta, exponents);
  return {angles.cos().to(type), angles.sin().to(type)};
}

at::Tensor rotate(const at::Tensor& x_BTHD, const at::Tensor& cosine, const at::Tensor& sine) { return Rotate::apply(x_BTHD, cosine, sine); }

}  // namespace pathattn
