// Numbers as 16-bit tensors hold them.
#pragma once

#include "kernels/cuda/hopper/ptx.cuh"
#include "kernels/problem.h"

namespace pathattn::cuda::hopper {

// Two neighbours of a bfloat16 or float16 tensor.
__device__ inline float2 unpack_input(uint32_t pair, DType dtype) {
  if (dtype == DType::kFloat16) return unpack(pair);
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

}  // namespace pathattn::cuda::hopper
