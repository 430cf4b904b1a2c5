#include "kernels/tests/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/portable.h"
#include "kernels/cuda/stick_breaking.h"
#include "kernels/tests/stick_breaking_backend.h"

namespace pathattn::test {
namespace {

void require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t size) : size_(size) { require(cudaMalloc(&data_, size + kTail)), require(cudaMemset(data_, 0xff, size + kTail)); }
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data_); }
  void* data() const { return data_; }
  bool tail_untouched() const {
    std::vector<unsigned char> tail(kTail);
    require(cudaMemcpy(tail.data(), static_cast<char*>(data_) + size_, kTail, cudaMemcpyDeviceToHost));
    return std::all_of(tail.begin(), tail.end(), [](unsigned char byte) { return byte == 0xff; });
  }

 private:
  static constexpr size_t kTail = 4096;
  size_t size_;
  void* data_ = nullptr;
};

// The device's copies of a call's tensors.
class Copies {
 public:
  explicit Copies(const Problem& problem) : problem_(problem) {}

  template <typename AnyView>
  void move(AnyView& view, DType dtype, int64_t heads, int64_t width) {
    if (view.data == nullptr) return;
    const Problem& p = problem_;
    const int64_t last = (p.batch - 1) * view.batch_stride + (p.tokens - 1) * view.token_stride + (heads - 1) * view.head_stride + width;
    const size_t size = last * element_size(dtype);
    memory_.emplace_back(size);
    require(cudaMemcpy(memory_.back().data(), view.data, size, cudaMemcpyHostToDevice));
    if constexpr (std::is_same_v<AnyView, View>) outputs_.push_back({view.data, &memory_.back(), size});
    view.data = memory_.back().data();
  }
  void move_cu_seqlens(Problem& p) {
    if (p.cu_seqlens == nullptr) return;
    const size_t size = (p.num_documents + 1) * sizeof(int64_t);
    memory_.emplace_back(size);
    require(cudaMemcpy(memory_.back().data(), p.cu_seqlens, size, cudaMemcpyHostToDevice));
    p.cu_seqlens = static_cast<const int64_t*>(memory_.back().data());
  }
  void bring_back() const {
    for (const Output& output : outputs_) {
      require(cudaMemcpy(output.host, output.device->data(), output.size, cudaMemcpyDeviceToHost));
      if (!output.device->tail_untouched()) throw std::runtime_error("written behind an output");
    }
  }

 private:
  struct Output {
    void* host;
    DeviceMemory* device;
    size_t size;
  };
  const Problem problem_;
  std::list<DeviceMemory> memory_;
  std::vector<Output> outputs_;
};

template <typename Arguments>
void move_common(Copies& copies, Arguments& a) {
  const Problem& p = a.problem;
  copies.move(a.q, p.dtype, p.query_heads, p.key_width);
  copies.move(a.k, p.dtype, p.key_heads, p.key_width);
  copies.move(a.v, p.dtype, p.key_heads, p.value_width);
  copies.move(a.w, DType::kFloat32, p.key_heads, p.key_width);
  copies.move(a.beta, DType::kFloat32, p.key_heads, 1);
  copies.move(a.g, DType::kFloat32, p.query_heads, 1);
  copies.move(a.o, p.dtype, p.query_heads, p.value_width);
  copies.move(a.lse, DType::kFloat32, p.query_heads, 1);
  copies.move(a.o_rest, p.dtype, p.query_heads, p.value_width);
}

template <typename Arguments, typename Kernel>
Status run(const Copies& copies, const Arguments& arguments, size_t workspace_size, Kernel kernel) {
  const DeviceMemory workspace(workspace_size);
  const Status status = kernel(arguments, workspace.data(), nullptr);
  require(cudaDeviceSynchronize());
  if (!workspace.tail_untouched()) throw std::runtime_error("written behind the workspace");
  copies.bring_back();
  return status;
}

struct Path {
  size_t (*forward_workspace_size)(const ForwardArguments&);
  size_t (*backward_workspace_size)(const BackwardArguments&);
  Status (*forward)(const ForwardArguments&, void*, cudaStream_t);
  Status (*backward)(const BackwardArguments&, void*, cudaStream_t);
};

Status forward_on_device(const Path& path, ForwardArguments a) {
  Copies copies(a.problem);
  move_common(copies, a);
  copies.move_cu_seqlens(a.problem);
  return run(copies, a, path.forward_workspace_size(a), path.forward);
}

Status backward_on_device(const Path& path, BackwardArguments a) {
  Copies copies(a.problem);
  const Problem& p = a.problem;
  move_common(copies, a);
  copies.move(a.d_o, p.dtype, p.query_heads, p.value_width);
  copies.move(a.d_lse, DType::kFloat32, p.query_heads, 1);
  copies.move(a.dq, p.dtype, p.query_heads, p.key_width);
  copies.move(a.dk, p.dtype, p.key_heads, p.key_width);
  copies.move(a.dv, p.dtype, p.key_heads, p.value_width);
  copies.move(a.dw, DType::kFloat32, p.key_heads, p.key_width);
  copies.move(a.dbeta, DType::kFloat32, p.key_heads, 1);
  copies.move(a.dg, DType::kFloat32, p.query_heads, 1);
  copies.move_cu_seqlens(a.problem);
  return run(copies, a, path.backward_workspace_size(a), path.backward);
}

Backend backend(std::string name, Path path) {
  return {std::move(name), [path](const ForwardArguments& a) { return forward_on_device(path, a); },
          [path](const BackwardArguments& a) { return backward_on_device(path, a); }};
}

template <typename Arguments>
size_t portable_size(size_t (*size)(const Problem&, bool, bool), const Arguments& a) {
  return size(a.problem, a.w.data, a.g.data);
}

}  // namespace

bool has_cuda_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

Backend cuda_backend() { return backend("cuda", {cuda::forward_workspace_size, cuda::backward_workspace_size, cuda::forward, cuda::backward}); }

Backend portable_cuda_backend() {
  return backend("cuda portable", {[](const ForwardArguments& a) { return portable_size(cuda::portable::forward_workspace_size, a); },
                                   [](const BackwardArguments& a) { return portable_size(cuda::portable::backward_workspace_size, a); },
                                   cuda::portable::forward, cuda::portable::backward});
}

Backend stick_breaking_cuda_backend() {
  return backend("cuda", {[](const ForwardArguments& a) { return cuda::stick_breaking_forward_workspace_size(a.problem); },
                          [](const BackwardArguments& a) { return cuda::stick_breaking_backward_workspace_size(a.problem); },
                          [](const ForwardArguments& a, void* workspace, cudaStream_t stream) {
                            return cuda::stick_breaking_forward(stick_breaking_arguments(a), workspace, stream);
                          },
                          [](const BackwardArguments& a, void* workspace, cudaStream_t stream) {
                            return cuda::stick_breaking_backward(stick_breaking_arguments(a), workspace, stream);
                          }});
}

}  // namespace pathattn::test
