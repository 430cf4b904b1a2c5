// The JSON header of a safetensors file, read token by token: no tree is built, a repeated key is seen, and 8.0 is told from 8.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace pathattn {

struct SafetensorsHeader {
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<uint64_t> offsets;  // begin, end
  };
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

constexpr std::string_view kSafetensorsMetadata = "__metadata__";

// Error naming `file` and tensor if the text is not what a header must be; whether dtype, shape and offsets fit each other is not looked at.
SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& file);

// A name as JSON, for messages: control characters in it do not reach a terminal, and the end of a very long one is left out.
std::string printable(std::string_view name);

}  // namespace pathattn
