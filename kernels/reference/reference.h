// PaTH attention as its definition reads: the oracle for every backend. All tensors are float64 (problem.dtype must be kFloat64).
// Time O(T^2 K) a head, memory O(T (T + K)) allocated inside: a tool for tests, never for users' data.
#pragma once

#include "kernels/problem.h"

namespace pathattn::reference {

Status forward(const ForwardArguments& arguments);
Status backward(const BackwardArguments& arguments);

}  // namespace pathattn::reference
