// A [batch, tokens, heads, width] tensor in guarded memory, in any of the kernels' formats and with any strides, read and written as double.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/problem.h"
#include "kernels/tests/guarded_memory.h"

namespace pathattn::test {

size_t element_size(DType dtype);
double load(const void* data, DType dtype, int64_t at);
void store(void* data, DType dtype, int64_t at, double value);  // rounds to nearest even
inline DType compute_type(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }
double unit_roundoff(DType dtype);  // half the distance from 1 to the next number

struct Shape {
  int64_t batch = 0, tokens = 0, heads = 0, width = 0;
  int64_t size() const { return batch * tokens * heads * width; }
};

enum class Layout {
  kContiguous,
  kHeadsFirst,  // memory [batch, heads, tokens, width]
  kFused,       // a slice of wider rows, starting at an odd element, with gaps between heads, rows and batches
};

class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Shape shape, Layout layout = Layout::kContiguous);
  // A view with strides of its own over `storage` elements; strides may be 0.
  Tensor(DType dtype, Shape shape, View strides, int64_t offset, int64_t storage);

  bool empty() const { return memory_ == nullptr; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  ConstView in() const { return {view_.data, view_.batch_stride, view_.token_stride, view_.head_stride}; }
  View out() const { return view_; }
  double at(int64_t b, int64_t t, int64_t h, int64_t c = 0) const { return load(view_.data, dtype_, index(b, t, h, c)); }
  void set(int64_t b, int64_t t, int64_t h, int64_t c, double value) { store(view_.data, dtype_, index(b, t, h, c), value); }

  void fill(const std::function<double(int64_t b, int64_t t, int64_t h, int64_t c)>& value);
  Tensor to(DType dtype, Layout layout = Layout::kContiguous) const;
  // Rows first ... first + count - 1 of batch row b, contiguous.
  Tensor rows(int64_t b, int64_t first, int64_t count) const;
  bool only_own_elements_written() const;

 private:
  int64_t index(int64_t b, int64_t t, int64_t h, int64_t c) const {
    return b * view_.batch_stride + t * view_.token_stride + h * view_.head_stride + c;
  }

  DType dtype_ = DType::kFloat32;
  Shape shape_;
  std::shared_ptr<GuardedMemory> memory_;
  int64_t offset_ = 0;  // elements of the storage before the view
  View view_;
};

double norm(const Tensor& x);
double largest(const Tensor& x);                                   // largest absolute value; infinity if any is NaN
double largest_difference(const Tensor& got, const Tensor& want);  // infinity if any is NaN
double relative_error(const Tensor& got, const Tensor& want);      // norm(got - want) / norm(want); infinity if got has a NaN
bool same_bits(const Tensor& x, const Tensor& y);

}  // namespace pathattn::test
