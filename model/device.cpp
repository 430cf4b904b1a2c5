#include "model/device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <charconv>

#include "base/error.h"

namespace pathattn {
namespace {

// N of "cuda:N", 0 of "cuda", -1 of anything else.
int cuda_index(std::string_view name) {
  if (name == "cuda") return 0;
  if (!name.starts_with("cuda:")) return -1;
  name.remove_prefix(5);
  int index = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
  return error == std::errc() && end == name.data() + name.size() ? index : -1;
}

bool has_cuda_kernels() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("pathattn::path_attention", "");
  return op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

}  // namespace

at::Device parse_device(const std::string& name) {
  if (name == "cpu") return at::kCPU;
  const int index = cuda_index(name);
  if (index < 0) fail("there is no device {}: cpu, cuda and cuda:N are known", name);
  if (!has_cuda_kernels())
    fail("the device {} needs CUDA kernels, which this program was built without: use cpu, or build it with PATHATTN_CUDA=ON", name);
  const int count = at::detail::getCUDAHooks().deviceCount();
  if (count == 0) fail("the device {} cannot be used, because no CUDA device or driver was found: see nvidia-smi, or use cpu", name);
  if (index >= count) fail("there is no device {}: this machine has {} CUDA device{}, counted from cuda:0", name, count, count == 1 ? "" : "s");
  return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

}  // namespace pathattn
