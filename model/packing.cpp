#include "model/packing.h"

#include <ATen/ops/empty.h>

#include "base/error.h"

namespace pathattn {

Packing::Packing(const at::Tensor& offsets, int64_t num_tokens, int64_t gap_, at::Device device) : gap(gap_) {
  if (offsets.dim() != 1 || offsets.numel() < 1 || (offsets.scalar_type() != at::kLong && offsets.scalar_type() != at::kInt))
    fail("cu_seqlens must be a vector of integers with at least one entry");
  cu_seqlens = offsets.to(at::kCPU, at::kLong).contiguous();
  num_documents = cu_seqlens.numel() - 1;
  const int64_t* starts = cu_seqlens.const_data_ptr<int64_t>();
  if (starts[0] != 0) fail("cu_seqlens must start with 0, it starts with {}", starts[0]);
  if (starts[num_documents] != num_tokens)
    fail("cu_seqlens must end with the number of tokens {}, it ends with {}", num_tokens, starts[num_documents]);
  for (int64_t n = 0; n < num_documents; ++n)
    if (starts[n + 1] < starts[n]) fail("cu_seqlens must not decrease: entry {} is {}, after {}", n + 1, starts[n + 1], starts[n]);

  spaced_length = num_tokens + num_documents * gap;
  positions = at::empty({num_tokens}, at::kLong);
  spaced_rows = at::empty({num_tokens}, at::kLong);
  last_rows = at::empty({num_documents * gap}, at::kLong);
  int64_t *position = positions.data_ptr<int64_t>(), *spaced = spaced_rows.data_ptr<int64_t>(), *last = last_rows.data_ptr<int64_t>();
  for (int64_t n = 0; n < num_documents; ++n) {
    for (int64_t t = starts[n]; t < starts[n + 1]; ++t) {
      position[t] = t - starts[n];
      spaced[t] = t + (n + 1) * gap;
    }
    for (int64_t i = 0; i < gap; ++i) last[n * gap + i] = starts[n + 1] + n * gap + i;
  }
  for (at::Tensor* tensor : {&cu_seqlens, &positions, &spaced_rows, &last_rows}) *tensor = tensor->to(device);
}

}  // namespace pathattn
