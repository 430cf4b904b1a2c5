#include "base/safetensors_header.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"

namespace pathattn {
namespace {

using nlohmann::json;

class HeaderReader : public nlohmann::json_sax<json> {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  SafetensorsHeader header;

  bool start_object(size_t) override {
    switch (state_) {
      case State::kStart:
        state_ = State::kNames;
        return true;
      case State::kMetadataStart:
        state_ = State::kMetadataKeys;
        return true;
      case State::kTensorStart:
        state_ = State::kFields;
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool end_object() override {
    switch (state_) {
      case State::kNames:
        state_ = State::kEnd;
        return true;
      case State::kMetadataKeys:
        state_ = State::kNames;
        return true;
      default:
        finish_tensor();
        return true;
    }
  }

  bool start_array(size_t) override {
    switch (state_) {
      case State::kShapeStart:
        state_ = State::kShape;
        return true;
      case State::kOffsetsStart:
        state_ = State::kOffsets;
        return true;
      default:
        return unexpected("a list");
    }
  }

  bool end_array() override {
    state_ = State::kFields;
    return true;
  }

  bool key(std::string& text) override {
    switch (state_) {
      case State::kNames:
        start_entry(text);
        return true;
      case State::kMetadataKeys:
        start_metadata(text);
        return true;
      default:
        start_field(text);
        return true;
    }
  }

  bool string(std::string& text) override {
    switch (state_) {
      case State::kMetadataValue:
        header.metadata[key_] = text;
        state_ = State::kMetadataKeys;
        return true;
      case State::kDtype:
        tensor_->dtype = text;
        state_ = State::kFields;
        return true;
      default:
        return unexpected("the string " + printable(text));
    }
  }

  bool number_unsigned(uint64_t number) override {
    if (state_ == State::kOffsets && tensor_->offsets.size() < 2) {
      tensor_->offsets.push_back(number);
    } else if (state_ == State::kShape && number <= INT64_MAX) {
      tensor_->shape.push_back(static_cast<int64_t>(number));
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
    kStart,
    kNames,
    kEnd,
    kMetadataStart,
    kMetadataKeys,
    kMetadataValue,
    kTensorStart,
    kFields,
    kDtype,
    kShapeStart,
    kShape,
    kOffsetsStart,
    kOffsets,
  };

  bool unexpected(const std::string& what) {
    switch (state_) {
      case State::kStart:
        fail("{}: the header must be a JSON object, not {}", file_, what);
      case State::kMetadataStart:
        fail("{}: {} must be an object of strings, not {}", file_, kSafetensorsMetadata, what);
      case State::kMetadataValue:
        fail("{}: {} has {} at {}, but its values must be strings", file_, kSafetensorsMetadata, what, printable(key_));
      case State::kTensorStart:
        fail("{}: tensor {} must be an object with dtype, shape and data_offsets, not {}", file_, printable(name_), what);
      case State::kDtype:
        fail("{}: tensor {}: dtype must be a string, not {}", file_, printable(name_), what);
      case State::kShapeStart:
      case State::kShape:
        fail("{}: tensor {}: shape must be a list of integers from 0 to 2^63-1, but has {}", file_, printable(name_), what);
      default:
        fail("{}: tensor {}: data_offsets must be a list of two integers, each at least 0, but has {}", file_, printable(name_), what);
    }
  }

  void start_entry(const std::string& text) {
    name_ = text;
    if (text == kSafetensorsMetadata) {
      if (std::exchange(has_metadata_, true)) fail("{}: {} appears twice", file_, kSafetensorsMetadata);
      state_ = State::kMetadataStart;
      return;
    }
    const auto [place, added] = header.tensors.try_emplace(text);
    if (!added) fail("{}: tensor {} appears twice", file_, printable(text));
    tensor_ = &place->second;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    state_ = State::kTensorStart;
  }

  void start_metadata(const std::string& text) {
    if (header.metadata.contains(text)) fail("{}: {} has the key {} twice", file_, kSafetensorsMetadata, printable(text));
    key_ = text;
    state_ = State::kMetadataValue;
  }

  void start_field(const std::string& text) {
    bool* seen = text == "dtype" ? &has_dtype_ : text == "shape" ? &has_shape_ : &has_offsets_;
    if (seen == &has_offsets_ && text != "data_offsets") {
      fail("{}: tensor {} has an unknown field {}", file_, printable(name_), printable(text));
    }
    if (std::exchange(*seen, true)) fail("{}: tensor {} has {} twice", file_, printable(name_), text);
    state_ = text == "dtype" ? State::kDtype : text == "shape" ? State::kShapeStart : State::kOffsetsStart;
  }

  void finish_tensor() {
    const char* missing = !has_dtype_ ? "dtype" : !has_shape_ ? "shape" : tensor_->offsets.size() != 2 ? "data_offsets" : nullptr;
    if (missing != nullptr) fail("{}: tensor {} lacks {} or has too few numbers there", file_, printable(name_), missing);
    state_ = State::kNames;
  }

  const std::string& file_;
  State state_ = State::kStart;
  std::string name_, key_;
  SafetensorsHeader::Tensor* tensor_ = nullptr;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;  // the last three of tensor_
};

}  // namespace

std::string printable(std::string_view name) {
  constexpr size_t kLongest = 120;
  std::string text(name.substr(0, kLongest));
  if (name.size() > kLongest) text += "...";
  return json(text).dump(-1, ' ', true, json::error_handler_t::replace);
}

SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& file) {
  HeaderReader reader(file);
  json::sax_parse(text, &reader);
  return std::move(reader.header);
}

}  // namespace pathattn
