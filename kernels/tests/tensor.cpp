#include "kernels/tests/tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace pathattn::test {

size_t element_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

double unit_roundoff(DType dtype) {
  return dtype == DType::kFloat64 ? 0x1p-53 : dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-9;
}

double load(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kFloat64) return static_cast<const double*>(data)[at];
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  if (dtype == DType::kFloat16) return static_cast<double>(static_cast<const _Float16*>(data)[at]);
  return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[at]) << 16);
}

void store(void* data, DType dtype, int64_t at, double value) {
  if (dtype == DType::kFloat64) {
    static_cast<double*>(data)[at] = value;
  } else if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = static_cast<float>(value);
  } else if (dtype == DType::kFloat16) {
    static_cast<_Float16*>(data)[at] = static_cast<_Float16>(value);
  } else {
    const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
    const uint32_t rounded = std::isnan(value) ? 0xffff0000 : bits + 0x7fff + ((bits >> 16) & 1);
    static_cast<uint16_t*>(data)[at] = static_cast<uint16_t>(rounded >> 16);
  }
}

Tensor::Tensor(DType dtype, Shape shape, View strides, int64_t offset, int64_t storage)
    : dtype_(dtype), shape_(shape), memory_(std::make_shared<GuardedMemory>(storage * element_size(dtype))), offset_(offset), view_(strides) {
  view_.data = memory_->data() + offset * element_size(dtype);
}

namespace {

View strides_of(const Shape& s, Layout layout) {
  if (layout == Layout::kHeadsFirst) return {nullptr, s.heads * s.tokens * s.width, s.width, s.tokens * s.width};
  if (layout == Layout::kContiguous) return {nullptr, s.tokens * s.heads * s.width, s.heads * s.width, s.width};
  const int64_t head = s.width + 3, row = 3 * s.heads * head + 1;
  return {nullptr, s.tokens * row + 7, row, head};
}

}  // namespace

Tensor::Tensor(DType dtype, Shape shape, Layout layout) {
  const View strides = strides_of(shape, layout);
  const int64_t offset = layout == Layout::kFused ? 1 : 0;
  const int64_t last = shape.size() == 0 ? 0
                                         : (shape.batch - 1) * strides.batch_stride + (shape.tokens - 1) * strides.token_stride +
                                               (shape.heads - 1) * strides.head_stride + shape.width;
  *this = Tensor(dtype, shape, strides, offset, offset + last);
}

void Tensor::fill(const std::function<double(int64_t, int64_t, int64_t, int64_t)>& value) {
  for (int64_t b = 0; b < shape_.batch; ++b) {
    for (int64_t t = 0; t < shape_.tokens; ++t) {
      for (int64_t h = 0; h < shape_.heads; ++h) {
        for (int64_t c = 0; c < shape_.width; ++c) set(b, t, h, c, value(b, t, h, c));
      }
    }
  }
}

Tensor Tensor::to(DType dtype, Layout layout) const {
  if (empty()) return {};
  Tensor copy(dtype, shape_, layout);
  copy.fill([&](int64_t b, int64_t t, int64_t h, int64_t c) { return at(b, t, h, c); });
  return copy;
}

Tensor Tensor::rows(int64_t b, int64_t first, int64_t count) const {
  if (empty()) return {};
  Tensor copy(dtype_, {1, count, shape_.heads, shape_.width});
  copy.fill([&](int64_t, int64_t t, int64_t h, int64_t c) { return at(b, first + t, h, c); });
  return copy;
}

bool Tensor::only_own_elements_written() const {
  if (empty()) return true;
  const size_t size = element_size(dtype_);
  std::vector<bool> own(memory_->size() / size);
  for (int64_t b = 0; b < shape_.batch; ++b) {
    for (int64_t t = 0; t < shape_.tokens; ++t) {
      for (int64_t h = 0; h < shape_.heads; ++h) {
        const auto first = own.begin() + offset_ + index(b, t, h, 0);
        std::fill(first, first + shape_.width, true);
      }
    }
  }
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i]) continue;
    for (size_t byte = 0; byte < size; ++byte) {
      if (memory_->data()[i * size + byte] != std::byte{0xff}) return false;
    }
  }
  return memory_->surroundings_untouched();
}

namespace {

template <typename Visit>
void for_each_pair(const Tensor& x, const Tensor& y, Visit&& visit) {
  const Shape& s = x.shape();
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t h = 0; h < s.heads; ++h) {
        for (int64_t c = 0; c < s.width; ++c) visit(x.at(b, t, h, c), y.at(b, t, h, c));
      }
    }
  }
}

bool same_shape(const Tensor& x, const Tensor& y) {
  const Shape &a = x.shape(), &b = y.shape();
  return x.empty() == y.empty() && a.batch == b.batch && a.tokens == b.tokens && a.heads == b.heads && a.width == b.width;
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

double norm(const Tensor& x) {
  double sum = 0;
  for_each_pair(x, x, [&](double value, double) { sum += value * value; });
  return std::sqrt(sum);
}

double largest(const Tensor& x) {
  double most = 0;
  for_each_pair(x, x, [&](double value, double) { most = std::isnan(value) ? kInfinity : std::max(most, std::abs(value)); });
  return most;
}

double largest_difference(const Tensor& got, const Tensor& want) {
  if (!same_shape(got, want)) return kInfinity;
  double most = 0;
  for_each_pair(got, want, [&](double x, double y) { most = std::isnan(x - y) ? kInfinity : std::max(most, std::abs(x - y)); });
  return most;
}

double relative_error(const Tensor& got, const Tensor& want) {
  if (!same_shape(got, want)) return kInfinity;
  double sum = 0;
  for_each_pair(got, want, [&](double x, double y) { sum += (x - y) * (x - y); });
  return std::isnan(sum) ? kInfinity : sum == 0 ? 0 : std::sqrt(sum) / norm(want);
}

bool same_bits(const Tensor& x, const Tensor& y) {
  if (!same_shape(x, y) || x.dtype() != y.dtype()) return false;
  bool same = true;
  for_each_pair(x, y, [&](double a, double b) { same = same && std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); });
  return same;
}

}  // namespace pathattn::test
