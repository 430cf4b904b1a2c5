// Stick-breaking attention as its definition reads: the oracle for every backend. All tensors are float64 (problem.dtype must be kFloat64).
// Time O(T^2 K) a head; allocates: a tool for tests, never for users' data.
#pragma once

#include "kernels/stick_breaking.h"

namespace pathattn::reference {

Status stick_breaking_forward(const StickBreakingForwardArguments& arguments);
Status stick_breaking_backward(const StickBreakingBackwardArguments& arguments);

}  // namespace pathattn::reference
