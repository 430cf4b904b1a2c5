// Memory for tests, as tight as the machine allows: filled with bytes 0xff (NaN in every format), an inaccessible page right behind it and
// one in front, so that a stray read or write past the end stops the program; bytes left over in the first page are watched.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace pathattn::test {

class GuardedMemory {
 public:
  GuardedMemory() = default;
  // `alignment` of the first byte; up to alignment - 1 watched bytes then lie between the end and the inaccessible page.
  explicit GuardedMemory(size_t size, size_t alignment = 1) : size_(size) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), body = (size + alignment - 1 + page) / page * page;
    mapped_ = body + 2 * page;
    void* map = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) std::abort();
    map_ = static_cast<std::byte*>(map);
    body_ = map_ + page;
    body_size_ = body;
    if (mprotect(body_, body, PROT_READ | PROT_WRITE) != 0) std::abort();
    std::memset(body_, 0xff, body);
    data_ = body_ + (body - size) / alignment * alignment;
  }
  GuardedMemory(GuardedMemory&& other) noexcept { swap(other); }
  GuardedMemory& operator=(GuardedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~GuardedMemory() {
    if (map_) munmap(map_, mapped_);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool surroundings_untouched() const {
    for (const std::byte* at = body_; at < body_ + body_size_; at = at + 1 == data_ ? data_ + size_ : at + 1) {
      if (at >= data_ && at < data_ + size_) continue;
      if (*at != std::byte{0xff}) return false;
    }
    return true;
  }

 private:
  void swap(GuardedMemory& other) {
    std::swap(map_, other.map_);
    std::swap(mapped_, other.mapped_);
    std::swap(body_, other.body_);
    std::swap(body_size_, other.body_size_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  std::byte* map_ = nullptr;
  size_t mapped_ = 0;
  std::byte* body_ = nullptr;
  size_t body_size_ = 0;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace pathattn::test
