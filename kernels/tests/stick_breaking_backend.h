// Stick-breaking attention as a Backend of the tests, so that their inputs and checks serve it too: `lse` and `d_lse` are rest and its gradient;
// w, beta and g must be empty.
#pragma once

#include "kernels/stick_breaking.h"
#include "kernels/tests/backend.h"
#include "kernels/tests/cases.h"

namespace pathattn::test {

StickBreakingForwardArguments stick_breaking_arguments(const ForwardArguments& arguments);
StickBreakingBackwardArguments stick_breaking_arguments(const BackwardArguments& arguments);

Backend stick_breaking_reference();
Backend stick_breaking_cpu(int num_workers = 1, Workers::Order order = Workers::Order::kThreads);

// Every length, width, document, group, stride and format that the table of cases is after, without what PaTH has besides.
const std::vector<Case>& stick_breaking_cases();

// Forward and backward by the reference, in float64, of the same rounded inputs.
Outputs stick_breaking_expected(const Inputs& in);

}  // namespace pathattn::test
