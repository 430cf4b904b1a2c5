#include "model/tensor_file.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pathattn {
namespace {

constexpr std::pair<const char*, at::ScalarType> kTypes[] = {{"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},  {"BF16", at::kBFloat16},
                                                             {"I64", at::kLong},   {"I32", at::kInt},   {"I16", at::kShort}, {"I8", at::kChar},
                                                             {"U8", at::kByte},    {"BOOL", at::kBool}};

const char* name_of(at::ScalarType type) {
  for (const auto& [name, candidate] : kTypes)
    if (candidate == type) return name;
  fail("tensors of type {} cannot be written", c10::toString(type));
}

}  // namespace

at::Tensor to_tensor(const SafetensorsEntry& entry, const std::string& name) {
  for (const auto& [dtype, type] : kTypes) {
    if (entry.dtype != dtype) continue;
    at::Tensor tensor = at::empty(entry.shape, type);
    if (!entry.bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), entry.bytes.data(), entry.bytes.size());
    return tensor;
  }
  fail("{}: tensors of type {} cannot be read", name, entry.dtype);
}

std::map<std::string, at::Tensor> load_tensors(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, entry] : file.entries()) tensors.emplace(name, to_tensor(entry, path.string() + ": " + name));
  return tensors;
}

void save_tensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                  const std::map<std::string, std::string>& metadata) {
  std::vector<at::Tensor> contiguous;
  std::map<std::string, SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    contiguous.push_back(tensor.detach().cpu().contiguous());
    const at::Tensor& kept = contiguous.back();
    entries.emplace(
        name,
        SafetensorsEntry{name_of(kept.scalar_type()), kept.sizes().vec(), {static_cast<const std::byte*>(kept.const_data_ptr()), kept.nbytes()}});
  }
  write_safetensors(path, entries, metadata);
}

}  // namespace pathattn
