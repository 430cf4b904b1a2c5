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

// Of two pairs the larger magnitudes, their signs of no meaning.
__device__ inline uint32_t larger_half(uint32_t x, uint32_t y) {
  uint32_t larger;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
  return larger;
}
__device__ inline uint32_t larger_bfloat16(uint32_t x, uint32_t y) {
  uint32_t larger;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
  return larger;
}

}  // namespace pathattn::cuda::hopper
