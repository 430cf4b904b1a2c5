// Stick-breaking attention as a PyTorch operator (torch.ops.pathattn.stick_breaking_attention), with autograd. kernels/stick_breaking.h has the
// equations. Layouts, types, strides, devices and errors are those of path_attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace pathattn {

// (o [B,T,HQ,V] like q, rest [B,T,HQ] float32 or float64). Differentiable once, in q, k and v, through both results. cu_seqlens and scale as for
// path_attention.
std::tuple<at::Tensor, at::Tensor> stick_breaking_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                            std::optional<double> scale, const std::optional<at::Tensor>& cu_seqlens);

}  // namespace pathattn
