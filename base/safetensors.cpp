#include "base/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/files.h"

namespace pathattn {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "tensor bytes are little-endian in the file and used as they are");

constexpr size_t kLengthBytes = 8;
constexpr std::string_view kMetadata = "__metadata__";

constexpr std::array<std::pair<std::string_view, size_t>, 17> kDtypeSizes = {{
    {"BOOL", 1}, {"U8", 1}, {"I8", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2},
    {"BF16", 2}, {"U32", 4}, {"I32", 4}, {"F32", 4},   {"U64", 8},     {"I64", 8},     {"F64", 8}, {"C64", 8},
}};

// A name as JSON, so that control characters in it do not reach a terminal; the middle of a very long one is left out.
std::string printable(std::string_view name) {
  constexpr size_t kLongest = 120;
  std::string text(name.substr(0, kLongest));
  if (name.size() > kLongest) text += "...";
  return json(text).dump(-1, ' ', true, json::error_handler_t::replace);
}

// Bytes that a tensor needs; nothing if that is more than 2^63 - 1.
std::optional<uint64_t> bytes_needed(size_t dtype_size, std::span<const int64_t> shape) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  auto bytes = static_cast<int64_t>(dtype_size);
  for (const int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return static_cast<uint64_t>(bytes);
}

std::string shape_text(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

struct Tensor {
  SafetensorsEntry entry;
  std::vector<uint64_t> offsets;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

// Receives the header's JSON token by token: no tree is built, a repeated key is seen, and 8.0 is told from 8.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  HeaderReader(const std::string& file, std::map<std::string, std::string>& metadata) : file_(file), metadata_(metadata) {}

  std::map<std::string, Tensor> tensors;

  bool start_object(size_t) override {
    switch (state_) {
      case State::kStart: state_ = State::kNames; return true;
      case State::kMetadataStart: state_ = State::kMetadataKeys; return true;
      case State::kTensorStart: state_ = State::kFields; return true;
      default: return unexpected("an object");
    }
  }

  bool end_object() override {
    switch (state_) {
      case State::kNames: state_ = State::kEnd; return true;
      case State::kMetadataKeys: state_ = State::kNames; return true;
      default: finish_tensor(); return true;
    }
  }

  bool start_array(size_t) override {
    switch (state_) {
      case State::kShapeStart: state_ = State::kShape; return true;
      case State::kOffsetsStart: state_ = State::kOffsets; return true;
      default: return unexpected("a list");
    }
  }

  bool end_array() override {
    state_ = State::kFields;
    return true;
  }

  bool key(std::string& text) override {
    switch (state_) {
      case State::kNames: start_entry(text); return true;
      case State::kMetadataKeys: start_metadata(text); return true;
      default: start_field(text); return true;
    }
  }

  bool string(std::string& text) override {
    switch (state_) {
      case State::kMetadataValue: metadata_[key_] = text; state_ = State::kMetadataKeys; return true;
      case State::kDtype: tensor_->entry.dtype = text; state_ = State::kFields; return true;
      default: return unexpected("the string " + printable(text));
    }
  }

  bool number_unsigned(uint64_t number) override {
    if (state_ == State::kOffsets && tensor_->offsets.size() < 2) {
      tensor_->offsets.push_back(number);
    } else if (state_ == State::kShape && number <= INT64_MAX) {
      tensor_->entry.shape.push_back(static_cast<int64_t>(number));
    } else {
      return unexpected(fmt::format("the number {}", number));
    }
    return true;
  }

  bool number_integer(int64_t number) override { return unexpected(fmt::format("the number {}", number)); }
  bool number_float(double, const std::string& text) override { return unexpected("the number " + text.substr(0, 40)); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool null() override { return unexpected("null"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    fail("{}: the header is not valid JSON in UTF-8 at byte {} of the header; the file is damaged or no safetensors file", file_, position);
  }

 private:
  enum class State {
    kStart, kNames, kEnd, kMetadataStart, kMetadataKeys, kMetadataValue, kTensorStart, kFields, kDtype, kShapeStart, kShape, kOffsetsStart, kOffsets,
  };

  bool unexpected(const std::string& what) {
    switch (state_) {
      case State::kStart: fail("{}: the header must be a JSON object, not {}", file_, what);
      case State::kMetadataStart: fail("{}: {} must be an object of strings, not {}", file_, kMetadata, what);
      case State::kMetadataValue: fail("{}: {} has {} at {}, but its values must be strings", file_, kMetadata, what, printable(key_));
      case State::kTensorStart: fail("{}: tensor {} must be an object with dtype, shape and data_offsets, not {}", file_, printable(name_), what);
      case State::kDtype: fail("{}: tensor {}: dtype must be a string, not {}", file_, printable(name_), what);
      case State::kShapeStart:
      case State::kShape: fail("{}: tensor {}: shape must be a list of integers from 0 to 2^63-1, but has {}", file_, printable(name_), what);
      default: fail("{}: tensor {}: data_offsets must be a list of two integers, each at least 0, but has {}", file_, printable(name_), what);
    }
  }

  void start_entry(const std::string& text) {
    name_ = text;
    if (text == kMetadata) {
      if (std::exchange(has_metadata_, true)) fail("{}: {} appears twice", file_, kMetadata);
      state_ = State::kMetadataStart;
      return;
    }
    const auto [place, added] = tensors.try_emplace(text);
    if (!added) fail("{}: tensor {} appears twice", file_, printable(text));
    tensor_ = &place->second;
    state_ = State::kTensorStart;
  }

  void start_metadata(const std::string& text) {
    if (metadata_.contains(text)) fail("{}: {} has the key {} twice", file_, kMetadata, printable(text));
    key_ = text;
    state_ = State::kMetadataValue;
  }

  void start_field(const std::string& text) {
    bool* seen = text == "dtype" ? &tensor_->has_dtype : text == "shape" ? &tensor_->has_shape : &tensor_->has_offsets;
    if (seen == &tensor_->has_offsets && text != "data_offsets") fail("{}: tensor {} has an unknown field {}", file_, printable(name_), printable(text));
    if (std::exchange(*seen, true)) fail("{}: tensor {} has {} twice", file_, printable(name_), text);
    state_ = text == "dtype" ? State::kDtype : text == "shape" ? State::kShapeStart : State::kOffsetsStart;
  }

  void finish_tensor() {
    const char* missing = !tensor_->has_dtype ? "dtype" : !tensor_->has_shape ? "shape" : tensor_->offsets.size() != 2 ? "data_offsets" : nullptr;
    if (missing != nullptr) fail("{}: tensor {} lacks {} or has too few numbers there", file_, printable(name_), missing);
    state_ = State::kNames;
  }

  const std::string& file_;
  std::map<std::string, std::string>& metadata_;
  State state_ = State::kStart;
  std::string name_, key_;
  Tensor* tensor_ = nullptr;
  bool has_metadata_ = false;
};

void check_size(const std::string& file, const std::string& name, const SafetensorsEntry& entry, uint64_t available) {
  const size_t size = safetensors_dtype_size(entry.dtype);
  if (size == 0) fail("{}: tensor {} has the dtype {}, which is not known", file, printable(name), printable(entry.dtype));
  const std::optional<uint64_t> needed = bytes_needed(size, entry.shape);
  if (!needed) fail("{}: tensor {} of shape {} and dtype {} is larger than any file", file, printable(name), shape_text(entry.shape), entry.dtype);
  if (*needed != available) {
    fail("{}: tensor {} of shape {} and dtype {} needs {} bytes, but has {}", file, printable(name), shape_text(entry.shape), entry.dtype, *needed, available);
  }
}

}  // namespace

size_t safetensors_dtype_size(std::string_view dtype) {
  const auto found = std::find_if(kDtypeSizes.begin(), kDtypeSizes.end(), [dtype](const auto& known) { return known.first == dtype; });
  return found == kDtypeSizes.end() ? 0 : found->second;
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
  const auto* header = reinterpret_cast<const char*>(file.data() + kLengthBytes);
  if (header_size == 0 || header[0] != '{') fail("{}: the header does not start with '{{'; the file is damaged or no safetensors file", name);

  metadata.clear();
  HeaderReader reader(name, metadata);
  json::sax_parse(header, header + header_size, &reader);

  const std::span<const std::byte> data = file.subspan(kLengthBytes + header_size);
  std::vector<std::pair<const std::string, Tensor>*> by_offset;
  for (auto& named : reader.tensors) by_offset.push_back(&named);
  std::stable_sort(by_offset.begin(), by_offset.end(), [](const auto* left, const auto* right) { return left->second.offsets < right->second.offsets; });
  uint64_t end_of_previous = 0;
  for (const auto* named : by_offset) {
    const auto& [tensor_name, tensor] = *named;
    const uint64_t begin = tensor.offsets[0], end = tensor.offsets[1];
    const auto refuse = [&](std::string_view why) { fail("{}: tensor {}: data_offsets [{}, {}] {}", name, printable(tensor_name), begin, end, why); };
    if (end < begin) refuse("end before they begin");
    if (end > data.size()) refuse(fmt::format("reach past the {} bytes of data; the file is cut off", data.size()));
    if (begin < end_of_previous) refuse("overlap another tensor");
    if (begin > end_of_previous) refuse(fmt::format("leave a gap after byte {}", end_of_previous));
    check_size(name, tensor_name, tensor.entry, end - begin);
    end_of_previous = end;
  }
  if (end_of_previous != data.size()) fail("{}: {} bytes follow the last tensor and belong to none", name, data.size() - end_of_previous);

  entries.clear();
  for (auto& [tensor_name, tensor] : reader.tensors) {
    tensor.entry.bytes = data.subspan(tensor.offsets[0], tensor.offsets[1] - tensor.offsets[0]);
    entries.emplace(tensor_name, std::move(tensor.entry));
  }
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : path_(path) {
  const auto refuse = [&path] { fail("cannot read {}: {}", path.string(), std::generic_category().message(errno)); };
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
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

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)), map_(std::exchange(other.map_, nullptr)), size_(std::exchange(other.size_, 0)),
      entries_(std::move(other.entries_)), metadata_(std::move(other.metadata_)) {}

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
    if (named.first == kMetadata) fail("cannot write {}: no tensor may be called {}", file, kMetadata);
    check_size("cannot write " + file, named.first, named.second, named.second.bytes.size());
    order.push_back(&named);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto* left, const auto* right) {
    return safetensors_dtype_size(left->second.dtype) > safetensors_dtype_size(right->second.dtype);
  });

  json header = json::object();
  if (!metadata.empty()) header[std::string(kMetadata)] = metadata;
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
