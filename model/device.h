// The device that a model computes on, by the name that users give it.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace pathattn {

// "cpu", "cuda" (the first device) or "cuda:N". Error that says why a device cannot be used: unknown name, built without CUDA kernels, no device or
// driver, no such number.
at::Device parse_device(const std::string& name);

}  // namespace pathattn
