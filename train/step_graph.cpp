#include "train/step_graph.h"

#include <ATen/Functions.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <memory>
#include <optional>
#include <utility>

namespace pathattn {
namespace {

class StepGraph {
 public:
  StepGraph(StepWork work, at::Device device)
      : work_(std::move(work)), device_(device), stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {
    const c10::cuda::CUDAGuard guard(device);
    c10::cuda::device_synchronize();  // what the default stream has yet to do to parameters and moments
  }

  at::Tensor operator()(const Batch& batch, const at::Tensor& learning_rate) {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    const bool is_packed = batch.cu_seqlens.defined() || batch_.cu_seqlens.defined();
    const bool is_known = batch_.tokens.defined() && batch_.tokens.sizes() == batch.tokens.sizes() && !is_packed;
    if (!is_known) {  // also sets up what a capture must find ready
      graph_.reset();
      batch_ = {batch.tokens.to(device_), batch.targets.to(device_), batch.cu_seqlens};
      learning_rate_ = learning_rate.to(device_);
      return work_(batch_, learning_rate_).cpu();
    }
    batch_.tokens.copy_(batch.tokens, /*non_blocking=*/true);
    batch_.targets.copy_(batch.targets, /*non_blocking=*/true);
    learning_rate_.copy_(learning_rate, /*non_blocking=*/true);
    if (!graph_) capture();
    graph_->replay();
    return results_.cpu();
  }

 private:
  void capture() {
    graph_.emplace();
    graph_->capture_begin();
    results_ = work_(batch_, learning_rate_);
    graph_->capture_end();
  }

  StepWork work_;
  at::Device device_;
  c10::cuda::CUDAStream stream_;  // the default one cannot be captured
  Batch batch_;                   // what the graph reads, and
  at::Tensor learning_rate_;
  at::Tensor results_;  // what it writes
  std::optional<at::cuda::CUDAGraph> graph_;
};

}  // namespace

StepWork by_graphs(StepWork work, at::Device device) {
  return [graph = std::make_shared<StepGraph>(std::move(work), device)](const Batch& batch, const at::Tensor& learning_rate) {
    return (*graph)(batch, learning_rate);
  };
}

}  // namespace pathattn
