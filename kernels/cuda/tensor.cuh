// A tensor of a call on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/problem.h"

namespace pathattn::cuda {

struct Tensor {
  void* data;
  int64_t batch_stride, token_stride, head_stride;
  DType dtype;

  __device__ float at(int64_t b, int64_t t, int h, int c = 0) const {
    const int64_t i = b * batch_stride + t * token_stride + h * head_stride + c;
    switch (dtype) {
      case DType::kBFloat16:
        return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
      case DType::kFloat16:
        return __half2float(static_cast<const __half*>(data)[i]);
      default:
        return static_cast<const float*>(data)[i];
    }
  }
  __device__ void set(int64_t b, int64_t t, int h, int c, float x) const {
    const int64_t i = b * batch_stride + t * token_stride + h * head_stride + c;
    switch (dtype) {
      case DType::kBFloat16:
        static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
        break;
      case DType::kFloat16:
        static_cast<__half*>(data)[i] = __float2half_rn(x);
        break;
      default:
        static_cast<float*>(data)[i] = x;
    }
  }
};

}  // namespace pathattn::cuda
