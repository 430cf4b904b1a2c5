#include "base/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/error_of.h"
#include "base/random.h"
#include "base/scratch_folder.h"

namespace {
thread_local size_t largest_allocation = 0;
}

// Watches every allocation of this program, to hold the reader to what it promises about damaged files.
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  largest_allocation = std::max(largest_allocation, size);
  return std::malloc(std::max<size_t>(size, 1));
}
[[gnu::noinline]] void* operator new(size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace pathattn {
namespace {

namespace fs = std::filesystem;
using Entries = std::map<std::string, SafetensorsEntry>;
using Metadata = std::map<std::string, std::string>;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kFuzzInputs = 100'000;
#else
constexpr int64_t kFuzzInputs = 1'000'000;
#endif

std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  return std::string(reinterpret_cast<const char*>(&size), 8) + header + data;
}

std::string with_length(uint64_t length, const std::string& rest) { return std::string(reinterpret_cast<const char*>(&length), 8) + rest; }

void parse(const std::string& file, Entries& entries, Metadata& metadata) {
  parse_safetensors(std::as_bytes(std::span(file)), "file.safetensors", entries, metadata);
}

Entries parse(const std::string& file) {
  Entries entries;
  Metadata metadata;
  parse(file, entries, metadata);
  return entries;
}

std::string error_of(const std::string& file) {
  return pathattn::error_of([&] { parse(file); });
}

std::string tensor_a(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

const std::string kEightBytes = "abcdefgh";

TEST(Safetensors, H01_faults_name_file_and_tensor) {
  const std::string good = tensor_a(R"("F32")", "[2]", "[0,8]");
  ASSERT_EQ(error_of(file_of(good, kEightBytes)), "");
  const struct {
    std::string file, expected;
  } cases[] = {
      {with_length(UINT64_MAX, good + kEightBytes), "18446744073709551615"},
      {with_length(0, good + kEightBytes), "header"},
      {with_length(100, "{}"), "only 2 follow"},
      {file_of("not JSON", kEightBytes), "header"},
      {file_of("{not JSON", kEightBytes), "not valid JSON"},
      {file_of("{\"\xff\xfe\":0}", kEightBytes), "UTF-8"},
      {file_of(tensor_a(R"("F32")", "[2]", "[8,0]"), kEightBytes), "\"a\": data_offsets [8, 0] end before"},
      {file_of(tensor_a(R"("F32")", "[3]", "[0,8]"), kEightBytes), "\"a\" of shape [3] and dtype F32 needs 12 bytes, but has 8"},
      {file_of(tensor_a(R"("F32")", "[4]", "[0,16]"), kEightBytes), "\"a\": data_offsets [0, 16] reach past the 8 bytes"},
      {file_of(tensor_a(R"("F32")", "[4]", "[18446744073709551608,18446744073709551615]"), kEightBytes), "\"a\""},
      {file_of(tensor_a(R"("F32")", "[4294967296,4294967296]", "[0,8]"), kEightBytes), "\"a\" of shape [4294967296, 4294967296]"},
      {file_of(tensor_a(R"("F32")", "[4611686018427387904,4]", "[0,8]"), kEightBytes), "\"a\" of shape [4611686018427387904, 4]"},
      {file_of(tensor_a(R"("F32")", "[4294967296,4294967296]", "[0,0]"), ""), "larger than any file"},  // 0 bytes modulo 2^64
      {file_of(tensor_a(R"("F32")", "[4611686018427387904,4]", "[0,0]"), ""), "larger than any file"},
      {file_of(tensor_a(R"("F32")", "[-2]", "[0,8]"), kEightBytes), "\"a\": shape"},
      {file_of(tensor_a(R"("F32")", "[2]", "[0,8.0]"), kEightBytes), "\"a\": data_offsets"},
      {file_of(tensor_a(R"("F7")", "[2]", "[0,8]"), kEightBytes), "\"a\" has the dtype \"F7\""},
      {file_of(good, kEightBytes + "more"), "4 bytes follow the last tensor"},
  };
  for (const auto& [file, expected] : cases) {
    const std::string error = error_of(file);
    EXPECT_NE(error.find("file.safetensors"), std::string::npos) << error;
    EXPECT_NE(error.find(expected), std::string::npos) << "expected: " << expected << "\nerror: " << error;
  }
}

TEST(Safetensors, H01_cut_at_every_byte) {
  const std::string file = file_of(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} )", kEightBytes);
  ASSERT_EQ(error_of(file), "");
  for (size_t size = 0; size < file.size(); ++size) {
    const std::string cut(file.data(), size);  // its own allocation, so that a read past the end is seen
    EXPECT_NE(error_of(cut), "") << size;
  }
}

TEST(Safetensors, H01_valid_files) {
  EXPECT_TRUE(parse(file_of("{}", "")).empty());
  const Entries scalar = parse(file_of(tensor_a(R"("F32")", "[]", "[0,4]"), "abcd"));
  EXPECT_TRUE(scalar.at("a").shape.empty());
  EXPECT_EQ(scalar.at("a").bytes.size(), 4u);
  const Entries none = parse(file_of(tensor_a(R"("F32")", "[0]", "[0,0]"), ""));
  EXPECT_EQ(none.at("a").shape, std::vector<int64_t>{0});
  EXPECT_TRUE(parse(file_of(tensor_a(R"("F64")", "[4611686018427387904,0,4]", "[0,0]"), "")).contains("a"));
  const std::string padded_file = file_of(tensor_a(R"("BF16")", "[2,2]", "[0,8]") + "       ", kEightBytes);
  const Entries padded = parse(padded_file);
  EXPECT_EQ(padded.at("a").dtype, "BF16");
  EXPECT_EQ(std::memcmp(padded.at("a").bytes.data(), kEightBytes.data(), 8), 0);
}

TEST(Safetensors, faults_between_tensors) {
  const auto two = [](const std::string& first, const std::string& second, const std::string& names = "ab") {
    return file_of("{\"" + names.substr(0, 1) + R"(":{"dtype":"F32","shape":[1],"data_offsets":)" + first + "},\"" + names.substr(1) +
                       R"(":{"dtype":"F32","shape":[1],"data_offsets":)" + second + "}}",
                   kEightBytes);
  };
  EXPECT_EQ(error_of(two("[0,4]", "[4,8]")), "");
  EXPECT_EQ(error_of(two("[4,8]", "[0,4]")), "");
  EXPECT_NE(error_of(two("[0,4]", "[4,8]", "aa")).find("\"a\" appears twice"), std::string::npos);
  EXPECT_NE(error_of(two("[0,4]", "[0,4]")).find("\"b\": data_offsets [0, 4] overlap"), std::string::npos);
  EXPECT_NE(error_of(two("[0,4]", "[2,6]")).find("\"b\": data_offsets [2, 6] overlap"), std::string::npos);
  EXPECT_NE(error_of(file_of(tensor_a(R"("F32")", "[1]", "[4,8]"), kEightBytes)).find("leave a gap after byte 0"), std::string::npos);
}

TEST(Safetensors, malformed_headers) {
  const std::string rest = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const struct {
    std::string header, expected;
  } cases[] = {
      {"{\"__metadata__\":5," + rest, "__metadata__ must be an object"},
      {"{\"__metadata__\":null," + rest, "__metadata__ must be an object"},
      {"{\"__metadata__\":{\"k\":1}," + rest, "__metadata__ has the number 1 at \"k\""},
      {"{\"__metadata__\":{\"k\":{}}," + rest, "__metadata__ has an object at \"k\""},
      {"{\"__metadata__\":{\"k\":\"v\",\"k\":\"w\"}," + rest, "__metadata__ has the key \"k\" twice"},
      {"{\"__metadata__\":{},\"__metadata__\":{}," + rest, "__metadata__ appears twice"},
      {R"({"a":7})", "tensor \"a\" must be an object"},
      {R"({"a":{}})", "tensor \"a\" lacks dtype"},
      {R"({"a":{"dtype":"F32"}})", "tensor \"a\" lacks shape"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", "tensor \"a\" lacks data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8]}})", "tensor \"a\" lacks data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", "tensor \"a\": data_offsets"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "tensor \"a\" has dtype twice"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"strides":[1]}})", "tensor \"a\" has an unknown field \"strides\""},
      {R"({"a":{"dtype":8,"shape":[2],"data_offsets":[0,8]}})", "tensor \"a\": dtype must be a string"},
      {R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", "tensor \"a\": shape"},
      {R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", "tensor \"a\": shape"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})", "tensor \"a\": shape"},
      {R"({"a":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}})", "tensor \"a\": shape"},
      {R"({"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}})", "not valid JSON"},
      {"{" + rest + "}", "not valid JSON"},
      {"{" + rest + "x", "not valid JSON"},
      {"{\"a\":" + std::string(100'000, '['), "tensor \"a\" must be an object"},
  };
  for (const auto& [header, expected] : cases) {
    const std::string error = error_of(file_of(header, kEightBytes));
    EXPECT_NE(error.find(expected), std::string::npos) << "expected: " << expected << "\nerror: " << error;
  }
  const std::string hostile = error_of(file_of("{\"\\u001b[2J" + std::string(5000, 'n') + "\":1}", ""));
  EXPECT_EQ(hostile.find('\x1b'), std::string::npos);
  EXPECT_LT(hostile.size(), 400u);
}

// Mutations of three valid files; PATHATTN_FUZZ_INPUTS sets how many, PATHATTN_FUZZ_SEED which.
TEST(Safetensors, H01_fuzz) {
  const char* inputs = std::getenv("PATHATTN_FUZZ_INPUTS");
  const char* seed = std::getenv("PATHATTN_FUZZ_SEED");
  const int64_t num_inputs = inputs != nullptr ? std::atoll(inputs) : kFuzzInputs;
  const std::string seeds[] = {
      file_of(tensor_a(R"("F32")", "[2]", "[0,8]"), kEightBytes),
      file_of(
          R"({"__metadata__":{"k":"v"},"b":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[0,3],"data_offsets":[8,8]}} )",
          kEightBytes),
      file_of("{}", ""),
  };
  const std::string tokens[] = {"{",
                                "}",
                                "[",
                                "]",
                                ",",
                                ":",
                                "\"",
                                "0",
                                "-1",
                                "8",
                                "1e9",
                                "18446744073709551615",
                                "9223372036854775807",
                                "null",
                                "true",
                                "\\u0000",
                                "\xff",
                                "\"dtype\"",
                                "\"shape\"",
                                "\"data_offsets\"",
                                "\"__metadata__\"",
                                "\"F64\""};
  Random random(seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1, 0);
  Entries entries;
  Metadata metadata;
  int64_t num_valid = 0;
  for (int64_t input = 0; input < num_inputs; ++input) {
    std::string file = seeds[random.below(std::size(seeds))];
    for (uint64_t mutations = 1 + random.below(3); mutations > 0; --mutations) {
      const size_t place = random.below(file.size() + 1);
      switch (random.below(6)) {
        case 0:
          file.resize(place);
          break;
        case 1:
          file.insert(place, tokens[random.below(std::size(tokens))]);
          break;
        case 2:
          file.erase(place, 1 + random.below(8));
          break;
        case 3:
          file.insert(place, file.substr(random.below(file.size() + 1), random.below(30)));
          break;
        default:
          if (place < file.size()) file[place] = static_cast<char>(random.below(256));
      }
      if (random.below(2) == 0 && file.size() > 8) {  // make the length right again, so that the mutation reaches the JSON
        const uint64_t length = file.size() - 8 - std::min<size_t>(file.size() - 8, 8 * random.below(2));
        std::memcpy(file.data(), &length, 8);
      }
    }
    // At its true size and address, so that a sanitizer sees a read past the end.
    const std::vector<std::byte> exact(reinterpret_cast<const std::byte*>(file.data()),
                                       reinterpret_cast<const std::byte*>(file.data()) + file.size());
    largest_allocation = 0;
    try {
      parse_safetensors(exact, "fuzz", entries, metadata);
      ++num_valid;
    } catch (const Error&) {
    }
    ASSERT_LE(largest_allocation, exact.size() + 2048) << "input " << input;  // the rest: parser's tables, text of the error
  }
  EXPECT_GT(num_valid, num_inputs / 200);  // otherwise the mutations are too wild to reach the later checks
  EXPECT_LT(num_valid, num_inputs);
}

TEST(Safetensors, write_then_read) {
  const ScratchFolder folder;
  const fs::path path = folder / "model.safetensors";
  const std::vector<float> weights = {1.5f, -2.25f, 3.0f, 0.125f, 1e30f, -0.0f};
  const std::vector<int64_t> ids = {7, -1};
  const std::vector<uint8_t> flags = {1, 2, 3};
  const Entries written = {{"flags", {"U8", {3}, std::as_bytes(std::span(flags))}},
                           {"ids", {"I64", {2}, std::as_bytes(std::span(ids))}},
                           {"nothing", {"F32", {0, 5}, {}}},
                           {"weights", {"F32", {2, 3}, std::as_bytes(std::span(weights))}}};
  write_safetensors(path, written, {{"format", "pt"}, {"ünï", "\"quoted\"\n"}});
  const SafetensorsFile file(path);
  ASSERT_EQ(file.entries().size(), 4u);
  for (const auto& [name, entry] : written) {
    EXPECT_EQ(file.at(name).dtype, entry.dtype);
    EXPECT_EQ(file.at(name).shape, entry.shape);
    EXPECT_TRUE(std::equal(entry.bytes.begin(), entry.bytes.end(), file.at(name).bytes.begin(), file.at(name).bytes.end()));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file.at(name).bytes.data()) % safetensors_dtype_size(entry.dtype), 0u);
  }
  EXPECT_EQ(file.metadata().at("ünï"), "\"quoted\"\n");
  EXPECT_EQ(pathattn::error_of([&] { file.at("lm_head.weight"); }), path.string() + ": there is no tensor \"lm_head.weight\"");
}

TEST(Safetensors, write_refuses_what_it_could_not_read) {
  const ScratchFolder folder;
  const fs::path path = folder / "bad.safetensors";
  const std::vector<float> two = {1, 2};
  const auto bytes = std::as_bytes(std::span(two));
  EXPECT_THROW(write_safetensors(path, {{"a", {"F32", {3}, bytes}}}), Error);
  EXPECT_THROW(write_safetensors(path, {{"a", {"F32", {-2}, bytes}}}), Error);
  EXPECT_THROW(write_safetensors(path, {{"a", {"float", {2}, bytes}}}), Error);
  EXPECT_THROW(write_safetensors(path, {{"__metadata__", {"F32", {2}, bytes}}}), Error);
  EXPECT_THROW(write_safetensors(path, {{"\xff", {"F32", {2}, bytes}}}), Error);
  EXPECT_FALSE(fs::exists(path));
}

TEST(Safetensors, unreadable_files) {
  const ScratchFolder folder;
  EXPECT_THROW(SafetensorsFile(folder / "missing.safetensors"), Error);
  EXPECT_THROW(SafetensorsFile{folder.path()}, Error);
  folder.write("empty.safetensors", "");
  EXPECT_THROW(SafetensorsFile(folder / "empty.safetensors"), Error);
}

TEST(Safetensors, reads_golden_files) {
  const fs::path golden = fs::path(PATHATTN_SOURCE_DIR) / "tests" / "golden";
  const SafetensorsFile file(golden / "op_path_mha.safetensors");
  EXPECT_EQ(file.at("q").dtype, "BF16");
  EXPECT_EQ(file.at("q").shape, (std::vector<int64_t>{2, 70, 4, 32}));
  EXPECT_EQ(file.metadata().at("gate_convention"), "none");
}

}  // namespace
}  // namespace pathattn
