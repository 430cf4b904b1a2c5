// Numbers as 16-bit tensors hold them, and powers of two to bring them into float16's range.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/hopper/ptx.cuh"
#include "kernels/problem.h"

namespace pathattn::cuda::hopper {

// Two neighbours of a bfloat16 or float16 tensor.
__device__ inline float2 unpack_input(uint32_t pair, DType dtype) {
  if (dtype == DType::kFloat16) return unpack(pair);
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

__device__ inline uint32_t pack_output(float x, float y, DType dtype) {
  if (dtype == DType::kFloat16) return pack(x, y);
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
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

__device__ inline float reciprocal_of_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

}  // namespace pathattn::cuda::hopper
