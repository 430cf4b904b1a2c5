// SwiGLU: down(silu(gate(x)) * up(x)).
#pragma once

#include <ATen/core/Tensor.h>

namespace pathattn {

// x [..., E]; gate and up [intermediate_size, E], down [E, intermediate_size]; all of one type.
at::Tensor feed_forward(const at::Tensor& x, const at::Tensor& gate_proj, const at::Tensor& up_proj, const at::Tensor& down_proj);

}  // namespace pathattn
