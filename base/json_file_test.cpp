#include "base/json_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/error_of.h"
#include "base/scratch_folder.h"

namespace pathattn {
namespace {

TEST(JsonFile, an_object_is_read) {
  const ScratchFolder folder;
  folder.write("a.json", R"({"a": [1, {"b": null}, {"b": null}], "c": 2.5, "b": {"a": {"a": 1}}})");
  EXPECT_EQ(read_json_object(folder / "a.json"),
            (nlohmann::json{{"a", {1, {{"b", nullptr}}, {{"b", nullptr}}}}, {"c", 2.5}, {"b", {{"a", {{"a", 1}}}}}}));
}

TEST(JsonFile, whatever_is_wrong_is_one_error_that_names_the_file) {
  const ScratchFolder folder;
  const std::string deep = "{\"a\":" + std::string(200'000, '[') + std::string(200'000, ']') + "}";
  const std::pair<std::string, const char*> faults[] = {{"", "not valid JSON"},
                                                        {"{\"a\": 1", "not valid JSON"},
                                                        {"{\"a\": \"\xC3\x28\"}", "not valid JSON"},
                                                        {"[1]", "not array"},
                                                        {"3", "not number"},
                                                        {R"({"a": 1, "a": 1})", "the field \"a\" appears twice"},
                                                        {R"({"b": [{"a": {}, "c": 1, "a": 1}]})", "the field \"a\" appears twice"},
                                                        {deep, "nested more than 64 deep"}};
  for (const auto& [text, fault] : faults) {
    folder.write("a.json", text);
    try {
      read_json_object(folder / "a.json");
      ADD_FAILURE() << fault;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(folder / "a.json"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(fault), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find("exception"), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(read_json_object(folder / "missing.json"), Error);
}

TEST(JsonFile, neither_a_pipe_nor_a_device_is_waited_for) {
  const ScratchFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe.json").c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", folder / "endless.json");
  for (const char* name : {"pipe.json", "endless.json"}) {
    EXPECT_EQ(error_of([&] { read_json_object(folder / name); }), fmt::format("cannot read {}: it is not a regular file", folder / name));
  }
}

}  // namespace
}  // namespace pathattn
