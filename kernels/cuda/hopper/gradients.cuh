// What backward's stages are given besides the call.
#pragma once

#include "kernels/cuda/hopper/carry_adjoint.cuh"
#include "kernels/cuda/hopper/far_gradient.cuh"
#include "kernels/cuda/hopper/local_gradients.cuh"
#include "kernels/cuda/hopper/output_gradients.cuh"
#include "kernels/cuda/hopper/pair_adjoint.cuh"

namespace pathattn::cuda::hopper {

struct Gradients {
  OutputGradients output;
  FarGradient far;
  CarryGradients carry;
  PairGradients pairs;
  LocalGradients local;
};

}  // namespace pathattn::cuda::hopper
