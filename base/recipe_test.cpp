#include "base/recipe.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error_of.h"
#include "base/scratch_folder.h"

namespace pathattn {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

Recipe load(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  const ScratchFolder folder;
  folder.write("recipe.toml", toml);
  return Recipe::load(folder / "recipe.toml", overrides);
}

void expect_error(const std::function<void()>& action, const std::vector<std::string>& expected) {
  const std::string error = error_of(action);
  for (const std::string& part : expected) EXPECT_NE(error.find(part), std::string::npos) << "no " << part << " in: " << error;
}

const char* kExample = R"(
[data]
kind = "text"
paths = ["a", "b"]
[train]
steps = 300
learning_rate = 3e-3
warm_up = 10
fused = true
)";

TEST(Recipe, reads_values_and_falls_back) {
  Recipe recipe = load(kExample);
  EXPECT_EQ(recipe.choice("data.kind", "flip_flop", {"text", "flip_flop"}), "text");
  EXPECT_EQ(recipe.strings("data.paths", {}), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(recipe.integer("train.steps", 1, 1, kMost), 300);
  EXPECT_EQ(recipe.number("train.learning_rate", 1, 0, 1), 3e-3);
  EXPECT_EQ(recipe.number("train.warm_up", 0, 0, 100), 10.0);
  EXPECT_TRUE(recipe.boolean("train.fused", false));
  recipe.refuse_unread();
  EXPECT_EQ(recipe.integer("train.batch_size", 16, 1, 100), 16);
  EXPECT_EQ(recipe.string("data.pattern", "*"), "*");
  EXPECT_EQ(recipe.strings("data.kind", {}), std::vector<std::string>{"text"});
  EXPECT_EQ(recipe.integer("train.steps.more", 3, 1, kMost), 3);
}

TEST(Recipe, unknown_key_names_the_nearest) {
  Recipe recipe = load("[train]\nstep = 5\n[model]\n");
  recipe.integer("train.steps", 1, 1, kMost);
  recipe.integer("train.seed", 1, 1, kMost);
  recipe.integer("model.width", 1, 1, kMost);
  expect_error([&] { recipe.refuse_unread(); }, {"there is no setting train.step;", "did you mean train.steps?"});

  Recipe section = load("[modle]\nwidth = 5\n");
  section.integer("train.steps", 1, 1, kMost);
  section.integer("model.width", 1, 1, kMost);
  expect_error([&] { section.refuse_unread(); }, {"modle.width", "did you mean model.width?"});

  Recipe empty_section = load("[modle]\n[model]\n");
  empty_section.integer("model.width", 1, 1, kMost);
  expect_error([&] { empty_section.refuse_unread(); }, {"there is no setting modle"});

  Recipe far = load("[model]\ndepth_of_pool = 5\n");
  far.integer("model.width", 1, 1, kMost);
  EXPECT_TRUE(
      error_of([&] { far.refuse_unread(); }).ends_with(": there is no setting model.depth_of_pool, or other settings leave it without a meaning"));

  Recipe overridden = load("", {"train.stpes=5"});
  overridden.integer("train.steps", 1, 1, kMost);
  expect_error([&] { overridden.refuse_unread(); }, {"train.stpes", "did you mean train.steps?"});
}

TEST(Recipe, wrong_types_and_ranges_name_key_value_and_what_is_allowed) {
  Recipe recipe = load("[a]\ntext = \"many\"\nbig = 101\nhalf = 0.5\nflag = 1\nlist = [1]\nwhole = 3.0\nvery = 9223372036854775807\n");
  expect_error([&] { recipe.integer("a.text", 1, 1, 100); }, {"a.text = \"many\"", "an integer from 1 to 100", ".toml"});
  expect_error([&] { recipe.integer("a.big", 1, 1, 100); }, {"a.big = 101", "from 1 to 100"});
  expect_error([&] { recipe.integer("a.big", 1, 200, kMost); }, {"at least 200"});
  expect_error([&] { recipe.integer("a.whole", 1, 1, 100); }, {"a.whole = 3.0", "an integer"});
  expect_error([&] { recipe.integer("a.very", 1, 1, 100); }, {"9223372036854775807"});
  EXPECT_EQ(recipe.integer("a.very", 1, 1, kMost), kMost);
  expect_error([&] { recipe.number("a.half", 0, 1, 2); }, {"a.half = 0.5", "a number from 1 to 2"});
  expect_error([&] { recipe.number("a.half", 0, 1, INFINITY); }, {"a number of at least 1"});
  expect_error([&] { recipe.number("a.flag.x", 0, 0, 0), recipe.number("a.text", 0, 0, 1); }, {"a.text"});
  expect_error([&] { recipe.boolean("a.flag", true); }, {"a.flag = 1", "true or false"});
  expect_error([&] { recipe.string("a.list", ""); }, {"a.list = [1]", "a string"});
  expect_error([&] { recipe.strings("a.list", {}); }, {"a.list = [1]", "list of strings"});
  expect_error([&] { recipe.choice("a.text", "few", {"few", "some"}); }, {"a.text = \"many\"", "one of \"few\", \"some\""});
  expect_error([&] { recipe.string("a", ""); }, {"a string"});
}

TEST(Recipe, overrides) {
  Recipe recipe = load(kExample, {"train.steps=7", "train.learning_rate=1e-4", "data.kind=flip_flop", "data.paths=[\"c\"]", "train.fused=false",
                                  "model.width=64", "train.steps=8", "name=", "data.pattern=a=b", "data.note=1\nx=2"});
  EXPECT_EQ(recipe.integer("train.steps", 1, 1, kMost), 8);
  EXPECT_EQ(recipe.number("train.learning_rate", 1, 0, 1), 1e-4);
  EXPECT_EQ(recipe.string("data.kind", ""), "flip_flop");
  EXPECT_EQ(recipe.strings("data.paths", {}), std::vector<std::string>{"c"});
  EXPECT_FALSE(recipe.boolean("train.fused", true));
  EXPECT_EQ(recipe.integer("model.width", 1, 1, kMost), 64);
  EXPECT_EQ(recipe.string("name", "x"), "");
  EXPECT_EQ(recipe.string("data.pattern", ""), "a=b");
  EXPECT_EQ(recipe.string("data.note", ""), "1\nx=2");
  EXPECT_EQ(recipe.integer("train.warm_up", 0, 0, kMost), 10);
  expect_error([] { load(kExample, {"train.steps"}); }, {"\"train.steps\"", "section.field=value"});
  expect_error([] { load(kExample, {"data.kind=\xff"}); }, {"data.kind", "UTF-8"});
  expect_error([] { load(kExample, {"=5"}); }, {"\"=5\""});
  expect_error([] { load(kExample, {"train..steps=5"}); }, {"empty"});
  expect_error([] { load(kExample, {"train.=5"}); }, {"empty"});
  expect_error([] { load(kExample, {"train=5"}); }, {"train", "a section"});
  expect_error([] { load(kExample, {"train.steps.x=5"}); }, {"train.steps.x", "not a section"});
}

TEST(Recipe, malformed_files) {
  expect_error([] { load("[train]\nsteps = \n"); }, {".toml, line 2"});
  expect_error([] { load("[train]\nsteps = 1\nsteps = 2\n"); }, {"line 3"});
  expect_error([] { load("[train\n"); }, {"line 1"});
  expect_error([] { load("a = \"\xff\"\n"); }, {"line 1"});
  expect_error([] { load(std::string("a = 1\n\0", 7)); }, {"line 2"});
  expect_error([] { load("a = 99999999999999999999\n"); }, {"line 1"});
  expect_error([] { load("[a]\nx = inf\n"); }, {"a.x", "finite"});
  expect_error([] { load("[a]\nx = 1979-05-27\n"); }, {"a.x", "date"});
  expect_error([] { load("\"a.b\" = 1\n"); }, {"\"a.b\"", "section"});
  expect_error([] { load("a = " + std::string(10'000, '[')); }, {"line 1"});
  expect_error([] { Recipe::load("/nowhere/recipe.toml"); }, {"/nowhere/recipe.toml", "No such file"});
}

TEST(Recipe, keys_of_many_parts_do_not_overflow_the_stack) {
  std::string key;
  for (int i = 0; i < 60'000; ++i) key += "a.";
  expect_error([&] { load("\n" + key + "a = 1"); }, {"line 2", "more than 16 parts"});
  expect_error([&] { load("[" + key + "a]"); }, {"more than 16 parts"});
  expect_error([&] { load("a = {" + key + "a = 1}"); }, {"more than 16 parts"});
  expect_error([&] { load(kExample, {key + "a=1"}); }, {"--set", "more than 16 parts"});
  expect_error([&] { load(kExample, {"train.x={" + key + "a=1}"}); }, {"--set", "more than 16 parts"});
  Recipe recipe = load("# 1. 2. 3. 4. 5. 6. 7. 8. 9. 10. 11. 12. 13. 14. 15. 16. 17.\n" + std::string(kExample),
                       {"data.paths=../../../../../../../../../../../../../../../../../../a"});
  EXPECT_EQ(recipe.integer("train.steps", 1, 1, kMost), 300);
}

TEST(Recipe, saved_as_json_and_back) {
  const Recipe recipe = load(kExample, {"model.width=64"});
  Recipe again = Recipe::from_json(nlohmann::json::parse(recipe.json().dump()), "run");
  EXPECT_EQ(again.json(), recipe.json());
  EXPECT_EQ(again.name(), "run");
  EXPECT_EQ(again.number("train.learning_rate", 1, 0, 1), 3e-3);
  EXPECT_EQ(again.integer("model.width", 1, 1, kMost), 64);
  expect_error([&] { again.refuse_unread(); }, {"run: there is no setting data.kind"});
  expect_error([] { Recipe::from_json(nlohmann::json::array(), "run"); }, {"run", "array"});
}

}  // namespace
}  // namespace pathattn
