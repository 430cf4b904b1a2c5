// Instruction sets the kernels are compiled for: AVX2, AVX-512, NEON, and what the compiler may always use. Included before any header of Highway.
#pragma once

// HWY_AVX3 - 1: extensions of AVX-512, which bring these kernels nothing. Vectors of unknown length (SVE) cannot be kept in arrays.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | (HWY_AVX3 - 1) | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
