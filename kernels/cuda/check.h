// What the host can check of a call whose pointers are the device's.
#pragma once

#include "kernels/problem.h"

namespace pathattn::cuda {

inline Status check_problem(const Problem& problem) {
  if (problem.dtype == DType::kFloat64) return {"float64 is not supported on CUDA devices: use float32, bfloat16 or float16", 0};
  if (problem.cu_seqlens && problem.batch != 1) return {"cu_seqlens needs batch 1", problem.batch};
  if (problem.num_documents < 0) return {"the number of documents must not be negative", problem.num_documents};
  return {};
}

// The host must not read device offsets; float16 is for CUDA devices alone.
template <typename Arguments>
Status check_on_host(Arguments arguments) {
  if (Status status = check_problem(arguments.problem); !status.ok()) return status;
  arguments.problem.cu_seqlens = nullptr;
  arguments.problem.num_documents = 0;
  if (arguments.problem.dtype == DType::kFloat16) arguments.problem.dtype = DType::kBFloat16;
  return check(arguments);
}

}  // namespace pathattn::cuda
