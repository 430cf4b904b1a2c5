#include "model/row_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace pathattn {
namespace {

constexpr double kUnitEps = 1e-6;
constexpr int64_t kBlockElements = 1 << 15;  // of x, for one task

// Independent sums, so that the compiler may use vectors.
template <typename T, typename Term>
T sum_of(int64_t width, Term term) {
  constexpr int64_t kLanes = 16;
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  T sum = 0;
  for (; i < width; ++i) sum += term(i);
  for (T lane : lanes) sum += lane;
  return sum;
}

struct Rows {
  int64_t width, count, per_block, num_blocks;
  explicit Rows(const at::Tensor& x) : width(x.size(-1)), count(width == 0 ? 0 : x.numel() / width) {
    per_block = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, width));
    num_blocks = (count + per_block - 1) / per_block;
  }
  // body(block, row) for all rows; the blocks do not depend on the number of threads.
  template <typename Body>
  void for_each(Body body) const {
    at::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block)
        for (int64_t row = block * per_block; row < std::min(count, (block + 1) * per_block); ++row) body(block, row);
    });
  }
};

// On CPUs, where torch's own take several passes over memory. y = x * r * weight, r = 1 / sqrt(factor * sum(x^2) + eps), factor = 1 / width for a
// mean. Without a weight, r = 0 for a row of zeros.
class RowNorm : public torch::autograd::Function<RowNorm> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x_strided, const std::optional<at::Tensor>& weight_strided,
                            double factor, double eps) {
    const at::Tensor x = x_strided.contiguous(), weight = weight_strided ? weight_strided->contiguous() : at::Tensor();
    const Rows rows(x);
    at::Tensor y = at::empty_like(x), scales = at::empty({rows.count}, x.options());
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "row_norm", [&] {
      const scalar_t *x_data = x.const_data_ptr<scalar_t>(), *weight_data = weight.defined() ? weight.const_data_ptr<scalar_t>() : nullptr;
      scalar_t *y_data = y.data_ptr<scalar_t>(), *scale_data = scales.data_ptr<scalar_t>();
      const int64_t weight_rows = weight.defined() ? weight.numel() / rows.width : 1;
      rows.for_each([&, width = rows.width](int64_t, int64_t row) {
        const scalar_t* x_row = x_data + row * width;
        scalar_t* y_row = y_data + row * width;
        const scalar_t squares = sum_of<scalar_t>(width, [&](int64_t i) { return x_row[i] * x_row[i]; });
        scalar_t scale = 1 / std::sqrt(scalar_t(factor) * squares + scalar_t(eps));
        if (weight_data) {
          const scalar_t* weight_row = weight_data + row % weight_rows * width;
          for (int64_t i = 0; i < width; ++i) y_row[i] = x_row[i] * scale * weight_row[i];
        } else {
          if (squares == 0) scale = 0;
          for (int64_t i = 0; i < width; ++i) y_row[i] = x_row[i] * scale;
        }
        scale_data[row] = scale;
      });
    });
    context->save_for_backward({x, weight, scales});
    context->saved_data["factor"] = factor;
    return y;
  }

  // With u = dy * weight: dx = r u - factor r^3 (x . u) x,  dweight = sum over rows of dy * x * r.
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &scales = saved[2];
    const double factor = context->saved_data["factor"].toDouble();
    const at::Tensor dy = gradients[0].contiguous();
    const Rows rows(x);
    at::Tensor dx = at::empty_like(x), dweight_of_blocks;
    if (weight.defined()) dweight_of_blocks = at::zeros({rows.num_blocks, weight.numel()}, x.options());
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "row_norm_backward", [&] {
      const scalar_t *x_data = x.const_data_ptr<scalar_t>(), *dy_data = dy.const_data_ptr<scalar_t>(),
                     *scale_data = scales.const_data_ptr<scalar_t>();
      const scalar_t* weight_data = weight.defined() ? weight.const_data_ptr<scalar_t>() : nullptr;
      scalar_t *dx_data = dx.data_ptr<scalar_t>(), *dweight_data = weight.defined() ? dweight_of_blocks.data_ptr<scalar_t>() : nullptr;
      const int64_t weight_size = weight.defined() ? weight.numel() : rows.width, weight_rows = weight_size / rows.width;
      rows.for_each([&, width = rows.width](int64_t block, int64_t row) {
        const scalar_t *x_row = x_data + row * width, *dy_row = dy_data + row * width;
        scalar_t* dx_row = dx_data + row * width;
        const scalar_t scale = scale_data[row], pull = -scalar_t(factor) * scale * scale * scale;
        if (weight_data) {
          const scalar_t* weight_row = weight_data + row % weight_rows * width;
          scalar_t* dweight_row = dweight_data + block * weight_size + row % weight_rows * width;
          const scalar_t along = pull * sum_of<scalar_t>(width, [&](int64_t i) { return x_row[i] * dy_row[i] * weight_row[i]; });
          for (int64_t i = 0; i < width; ++i) {
            dx_row[i] = scale * dy_row[i] * weight_row[i] + along * x_row[i];
            dweight_row[i] += dy_row[i] * x_row[i] * scale;
          }
        } else {
          const scalar_t along = pull * sum_of<scalar_t>(width, [&](int64_t i) { return x_row[i] * dy_row[i]; });
          for (int64_t i = 0; i < width; ++i) dx_row[i] = scale * dy_row[i] + along * x_row[i];
        }
      });
    });
    at::Tensor dweight;
    if (weight.defined()) dweight = dweight_of_blocks.sum(0).view(weight.sizes());
    return {dx, dweight, {}, {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (!x.is_cpu()) return at::rms_norm(x, {x.size(-1)}, {}, eps) * weight;
  return RowNorm::apply(x, std::optional<at::Tensor>(weight), 1.0 / static_cast<double>(x.size(-1)), eps);
}

at::Tensor unit_norm(const at::Tensor& x) {
  if (!x.is_cpu()) {
    const at::Tensor squares = x.square().sum(-1, /*keepdim=*/true);
    return x * at::where(squares == 0, 0, (squares + kUnitEps).rsqrt());
  }
  return RowNorm::apply(x, std::optional<at::Tensor>(), 1.0, kUnitEps);
}

}  // namespace pathattn
