// Hands out parts of a call's workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pathattn::cuda {

// From the workspace's start, each part on a multiple of kAlignment; with a null base it only counts.
class Arena {
 public:
  static constexpr size_t kAlignment = 256;
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  void take(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace pathattn::cuda
