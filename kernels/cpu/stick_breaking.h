// Stick-breaking attention on a CPU: Highway SIMD, every core, memory linear in the number of tokens. docs/cpu-kernels.md explains how.
// Results are bit-identical from run to run and for any number of workers. No call allocates, throws or prints.
#pragma once

#include <cstddef>

#include "kernels/executor.h"
#include "kernels/stick_breaking.h"

namespace pathattn::cpu {

// Bytes of scratch the call of the same name needs, 64-byte aligned; its contents before and after mean nothing. 0 for a problem that is refused.
size_t stick_breaking_forward_workspace_size(const Problem& problem, int num_workers);
size_t stick_breaking_backward_workspace_size(const Problem& problem, int num_workers);

Status stick_breaking_forward(const StickBreakingForwardArguments& arguments, void* workspace, const Executor& executor);
Status stick_breaking_backward(const StickBreakingBackwardArguments& arguments, void* workspace, const Executor& executor);

}  // namespace pathattn::cpu
