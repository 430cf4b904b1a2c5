// The safetensors file format, without torch: 8 bytes little-endian header length, JSON header, tensor bytes.
// https://huggingface.co/docs/safetensors; docs/file-formats.md has what we accept. A damaged file gives one Error that names file and tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pathattn {

struct SafetensorsEntry {
  std::string dtype;  // "F32", "BF16", ... as in the file
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // of a file read: aligned to nothing, so copy rather than cast
};

size_t safetensors_dtype_size(std::string_view dtype);  // bytes an element; 0 if unknown

// A file mapped read-only; entries point into the map and live as long as this object. No allocation is sized by a number that the file claims.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const SafetensorsEntry& at(const std::string& name) const;  // Error names file and tensor if absent
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::filesystem::path path_;
  void* map_ = nullptr;
  size_t size_ = 0;
  std::map<std::string, SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

// Parses a file's bytes (what SafetensorsFile and the fuzz test call). `name` is used in errors.
void parse_safetensors(std::span<const std::byte> file, const std::string& name, std::map<std::string, SafetensorsEntry>& entries,
                       std::map<std::string, std::string>& metadata);

// Writes atomically. Tensors lie by falling element size, then by name, without gaps after a header padded to 8 bytes: each is aligned to its
// element, and the public library reads the file. Error, and no file, if an entry's bytes are not what its dtype and shape need.
void write_safetensors(const std::filesystem::path& path, const std::map<std::string, SafetensorsEntry>& entries,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace pathattn
