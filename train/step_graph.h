// The work of one training step on a GPU as a CUDA graph: captured when a second batch in a row has the same shape, then replayed. Launching the
// kernels of a small model one by one takes longer than running them. A replay runs the very kernels of the first time, so it changes no bit.
#pragma once

#include <c10/core/Device.h>

#include <functional>

#include "data/stream.h"

namespace pathattn {

// Of a batch and a learning rate (float32, of no dimension) to results, all on the device. Must not wait for the device.
using StepWork = std::function<at::Tensor(const Batch&, const at::Tensor&)>;

// The same work by graphs, for batches on the CPU; gives the results on the CPU, once they are there. In builds with CUDA alone.
// Packed documents are worked on without a graph: their offsets are read on the CPU, which a capture would freeze.
StepWork by_graphs(StepWork work, at::Device device);

}  // namespace pathattn
