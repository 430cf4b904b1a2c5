// A call's arguments as its kernels are given them, and what becomes of their errors.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tensor.cuh"

namespace pathattn::cuda {

inline Tensor tensor(const ConstView& view, DType dtype) {
  return {const_cast<void*>(view.data), view.batch_stride, view.token_stride, view.head_stride, dtype};
}
inline Tensor tensor(const View& view, DType dtype) { return {view.data, view.batch_stride, view.token_stride, view.head_stride, dtype}; }

inline Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {cudaGetErrorString(error), static_cast<int64_t>(error)};
}

}  // namespace pathattn::cuda
