// Normalisation of the rows of a tensor (its last dimension, width D), differentiable once. float32 or float64.
#pragma once

#include <ATen/core/Tensor.h>

namespace pathattn {

// y = x / sqrt(mean(x^2) + eps) * weight. weight: [D], or [H, D] for x [..., H, D].
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// y = x / sqrt(sum(x^2) + 1e-6). A row of zeros stays zero and passes no gradient back: the step that w makes is even in w, so its gradient there is
// zero, and the factor 1e3 must not raise a rounding residue above it.
at::Tensor unit_norm(const at::Tensor& x);

}  // namespace pathattn
