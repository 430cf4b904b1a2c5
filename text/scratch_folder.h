// A folder for a test's files, removed at its end.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <string_view>

#include "base/files.h"

namespace pathattn {

class ScratchFolder {
 public:
  ScratchFolder() : path_(std::filesystem::path(testing::TempDir()) / ("pathattn_test." + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~ScratchFolder() { std::filesystem::remove_all(path_); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(std::string_view name) const { return (path_ / name).string(); }
  void write(std::string_view name, std::string_view bytes) const { write_file_atomically(path_ / name, bytes); }

 private:
  std::filesystem::path path_;
};

}  // namespace pathattn
