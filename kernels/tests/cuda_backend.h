// CUDA kernels as a backend of the tests: tensors are copied to the device and back, gaps between their elements included.
#pragma once

#include "kernels/tests/backend.h"

namespace pathattn::test {

bool has_cuda_device();
Backend cuda_backend();  // whichever path takes the arguments
Backend portable_cuda_backend();
Backend stick_breaking_cuda_backend();  // kernels/tests/stick_breaking_backend.h says what stands for what

}  // namespace pathattn::test
