#include "base/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/safetensors_header.h"

namespace pathattn {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "tensor bytes are little-endian in the file and used as they are");

constexpr size_t kLengthBytes = 8;

// Bytes that a tensor needs; nothing if that is more than 2^63 - 1.
std::optional<uint64_t> bytes_needed(size_t dtype_size, std::span<const int64_t> shape) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  auto bytes = static_cast<int64_t>(dtype_size);
  for (const int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return static_cast<uint64_t>(bytes);
}

void check_size(const std::string& file, const std::string& name, const std::string& dtype, std::span<const int64_t> shape, uint64_t available) {
  const size_t size = safetensors_dtype_size(dtype);
  if (size == 0) fail("{}: tensor {} has the dtype {}, which is not known", file, printable(name), printable(dtype));
  const std::string what = fmt::format("{}: tensor {} of shape [{}] and dtype {}", file, printable(name), fmt::join(shape, ", "), dtype);
  const std::optional<uint64_t> needed = bytes_needed(size, shape);
  if (!needed) fail("{} is larger than any file", what);
  if (*needed != available) fail("{} needs {} bytes, but has {}", what, *needed, available);
}

// The tensors must cover the data from the first byte to the last, each with the bytes that it needs.
void check_layout(const std::string& file, const SafetensorsHeader& header, uint64_t data_size) {
  std::vector<const std::pair<const std::string, SafetensorsHeader::Tensor>*> by_offset;
  for (const auto& named : header.tensors) by_offset.push_back(&named);
  std::stable_sort(by_offset.begin(), by_offset.end(),
                   [](const auto* left, const auto* right) { return left->second.offsets < right->second.offsets; });
  uint64_t end_of_previous = 0;
  for (const auto* named : by_offset) {
    const auto& [name, tensor] = *named;
    const uint64_t begin = tensor.offsets[0], end = tensor.offsets[1];
    const std::string what = fmt::format("{}: tensor {}: data_offsets [{}, {}]", file, printable(name), begin, end);
    if (end < begin) fail("{} end before they begin", what);
    if (end > data_size) fail("{} reach past the {} bytes of data; the file is cut off", what, data_size);
    if (begin < end_of_previous) fail("{} overlap another tensor", what);
    if (begin > end_of_previous) fail("{} leave a gap after byte {}", what, end_of_previous);
    check_size(file, name, tensor.dtype, tensor.shape, end - begin);
    end_of_previous = end;
  }
  if (end_of_previous != data_size) fail("{}: {} bytes follow the last tensor and belong to none", file, data_size - end_of_previous);
}

}  // namespace

size_t safetensors_dtype_size(std::string_view dtype) {
  static const std::map<std::string_view, size_t> sizes = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
                                                           {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},     {"I32", 4},
                                                           {"F32", 4},  {"U64", 8}, {"I64", 8}, {"F64", 8},     {"C64", 8}};
  const auto found = sizes.find(dtype);
  return found == sizes.end() ? 0 : found->second;
}

void parse_safetensors(std::span<const std::byte> file, const std::string& name, std::map<std::string, SafetensorsEntry>& entries,
                       std::map<std::string, std::string>& metadata) {
  if (file.size() < kLengthBytes) fail("{}: {} bytes are too few for a safetensors file; it is cut off or none", name, file.size());
  uint64_t header_size = 0;
  std::memcpy(&header_size, file.data(), kLengthBytes);
  if (header_size > file.size() - kLengthBytes) {
    fail("{}: the header should have {} bytes, but only {} follow; the file is cut off or no safetensors file", name, header_size,
         file.size() - kLengthBytes);
  }
  const std::string_view header_text(reinterpret_cast<const char*>(file.data() + kLengthBytes), header_size);
  if (!header_text.starts_with('{')) fail("{}: the header does not start with '{{'; the file is damaged or no safetensors file", name);

  SafetensorsHeader header = parse_safetensors_header(header_text, name);
  const std::span<const std::byte> data = file.subspan(kLengthBytes + header_size);
  check_layout(name, header, data.size());
  metadata = std::move(header.metadata);
  entries.clear();
  for (auto& [tensor_name, tensor] : header.tensors) {
    const std::span<const std::byte> bytes = data.subspan(tensor.offsets[0], tensor.offsets[1] - tensor.offsets[0]);
    entries.emplace(tensor_name, SafetensorsEntry{std::move(tensor.dtype), std::move(tensor.shape), bytes});
  }
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : path_(path) {
  const auto refuse = [&path] { fail("cannot read {}: {}", path.string(), std::generic_category().message(errno)); };
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // not to wait for the writer of a pipe
  if (file < 0) refuse();
  struct stat facts {};
  if (::fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    ::close(file);
    fail("cannot read {}: it is not a regular file", path.string());
  }
  size_ = static_cast<size_t>(facts.st_size);
  map_ = size_ == 0 ? nullptr : ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
  if (map_ == MAP_FAILED) map_ = nullptr;
  const int map_error = errno;
  ::close(file);
  errno = map_error;
  if (map_ == nullptr && size_ > 0) refuse();
  try {
    parse_safetensors({static_cast<const std::byte*>(map_), size_}, path.string(), entries_, metadata_);
  } catch (...) {
    if (map_ != nullptr) ::munmap(map_, size_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) ::munmap(map_, size_);
}

const SafetensorsEntry& SafetensorsFile::at(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail("{}: there is no tensor {}", path_.string(), printable(name));
  return found->second;
}

void write_safetensors(const std::filesystem::path& path, const std::map<std::string, SafetensorsEntry>& entries,
                       const std::map<std::string, std::string>& metadata) {
  const std::string file = path.string();
  std::vector<const std::pair<const std::string, SafetensorsEntry>*> order;
  for (const auto& named : entries) {
    if (named.first == kSafetensorsMetadata) fail("cannot write {}: no tensor may be called {}", file, kSafetensorsMetadata);
    check_size("cannot write " + file, named.first, named.second.dtype, named.second.shape, named.second.bytes.size());
    order.push_back(&named);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto* left, const auto* right) {
    return safetensors_dtype_size(left->second.dtype) > safetensors_dtype_size(right->second.dtype);
  });

  json header = json::object();
  if (!metadata.empty()) header[std::string(kSafetensorsMetadata)] = metadata;
  uint64_t offset = 0;
  std::vector<std::string_view> pieces(2);  // length and header go before the tensors
  for (const auto* named : order) {
    const auto& [name, entry] = *named;
    header[name] = {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {offset, offset + entry.bytes.size()}}};
    offset += entry.bytes.size();
    pieces.emplace_back(reinterpret_cast<const char*>(entry.bytes.data()), entry.bytes.size());
  }
  std::string header_text;
  try {
    header_text = header.dump();
  } catch (const json::exception&) {
    fail("cannot write {}: a name or the metadata is not valid UTF-8", file);
  }
  header_text.resize((header_text.size() + 7) / 8 * 8, ' ');
  const uint64_t header_size = header_text.size();
  pieces[0] = {reinterpret_cast<const char*>(&header_size), kLengthBytes};
  pieces[1] = header_text;
  write_file_atomically(path, pieces);
}

}  // namespace pathattn
