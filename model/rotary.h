// Rotary positions in Llama's layout: element i of a head is paired with element i + D/2.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace pathattn {

// cos and sin of position * theta^(-2i/D), i < D/2, computed in float64. positions [B, T] (or [1, T]) to [B, T, 1, D/2] of type `type`.
std::pair<at::Tensor, at::Tensor> rotation_at(const at::Tensor& positions_BT, int64_t head_dim, double theta, at::ScalarType type);

// y_i = x_i cos - x_{i+D/2} sin,  y_{i+D/2} = x_{i+D/2} cos + x_i sin, for x [B, T, H, D]; differentiable once.
at::Tensor rotate(const at::Tensor& x_BTHD, const at::Tensor& cosine, const at::Tensor& sine);

}  // namespace pathattn
