// pathattn evaluate
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/json_file.h"
#include "base/say.h"
#include "cli/commands.h"
#include "cli/model.h"
#include "cli/standard_output.h"
#include "data/text_windows.h"
#include "evaluate/bits_by_position.h"
#include "evaluate/task_metrics.h"
#include "model/parameters.h"
#include "train/settings.h"
#include "train/train.h"

namespace pathattn {
namespace {
namespace fs = std::filesystem;
using json = nlohmann::ordered_json;  // ranges of position in their order

struct Arguments {
  ModelOptions model;
  std::string recipe, output;
  std::vector<std::string> overrides;
  int64_t num_sequences = 0, num_windows = 128;
  std::vector<int64_t> positions = {128, 256, 512, 1024, 1536, 2048};
};

// Refuses before the evaluation what could not be written after it. Folders that are missing are made then.
void check_output(const fs::path& file) {
  if (!file.has_filename() || fs::is_directory(file)) fail("--output {} is a folder: name the file to write", file.string());
  fs::path folder = fs::absolute(file).parent_path();
  while (!fs::exists(folder)) folder = folder.parent_path();
  if (!fs::is_directory(folder)) fail("--output {} cannot be written: {} is not a folder", file.string(), folder.string());
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    fail("--output {} cannot be written into {}: {}", file.string(), folder.string(), std::generic_category().message(errno));
  }
}

// The training that made the model, if it lies in a checkpoint; an empty object otherwise.
json read_training(const fs::path& directory) {
  return fs::exists(directory / "trainer.json") ? json(read_json_object(directory / "trainer.json")) : json::object();
}

Recipe find_recipe(const Arguments& arguments, const fs::path& directory, const json& training) {
  if (!arguments.recipe.empty()) {
    Recipe recipe = Recipe::load(arguments.recipe, arguments.overrides);
    check_recipe(recipe, "cpu");
    return recipe;
  }
  if (!arguments.overrides.empty()) fail("--set needs --recipe, whose fields it changes");
  if (!training.contains("recipe")) fail("{} does not say what it was trained on: name a --recipe with its data", directory.string());
  return Recipe::from_json(training.at("recipe"), (directory / "trainer.json").string());
}

json evaluate_text(const Arguments& arguments, const LanguageModel& model, Recipe& recipe, int64_t training_length) {
  const std::vector<int64_t>& edges = arguments.positions;
  if (edges.size() < 2 || edges.front() < 0 || std::adjacent_find(edges.begin(), edges.end(), std::greater_equal<>()) != edges.end()) {
    fail("--positions must be at least two rising numbers, for example 128,256,512");
  }
  if (model.config().vocabulary_size != kNumByteTokens) {
    fail("the model has {} tokens, text as bytes {}: evaluate it on what it was trained on", model.config().vocabulary_size, kNumByteTokens);
  }
  const Batch windows = evaluation_windows(read_text(recipe).validation, arguments.num_windows, edges.back());
  return {{"task", "text"},
          {"training_length", training_length},
          {"windows", windows.tokens.size(0)},
          {"bits_per_byte", evaluate_bits_by_position(model, windows, edges)}};
}

struct Table {
  const char *rows, *values, *unit;  // headings, and what stands behind each value
  const char* key;                   // of the object with the rows; null: the result itself
};

void print_table(const json& result) {
  static const std::map<std::string, Table> kTables = {{"text", {"position", "bits per byte", "", "bits_per_byte"}},
                                                       {"flip_flop", {"test set", "error", " %", nullptr}},
                                                       {"word_problem", {"length", "accuracy", " %", "accuracy"}},
                                                       {"mqrar", {"recalls", "", " %", nullptr}},
                                                       {"swap_identity", {"product", "accuracy", " %", "accuracy"}}};
  const Table& table = kTables.at(result.at("task").get<std::string>());
  say("{:<18}{}\n", table.rows, table.values);
  for (const auto& [name, value] : (table.key ? result.at(table.key) : result).items()) {
    if (value.is_number_float()) say("{:<18}{:.3f}{}\n", name, value.get<double>(), table.unit);
  }
}

void run(const Arguments& arguments) {
  if (!arguments.output.empty()) check_output(arguments.output);
  const fs::path directory = find_model_directory(arguments.model.path);
  json training = read_training(directory);
  Recipe recipe = find_recipe(arguments, directory, training);
  const LanguageModel model = arguments.model.load(directory);
  const int64_t training_length = TrainSettings::read(recipe).tokens;
  json result = read_data_kind(recipe) == "text" ? evaluate_text(arguments, model, recipe, training_length)
                                                 : evaluate_task(model, recipe, training_length, arguments.num_sequences);
  for (const char* internal : {"recipe", "data", "loss"}) training.erase(internal);
  training["kind"] = name_of(model.config().kind);
  training["parameters"] = num_parameters(model.config());
  result["run"] = training;

  print_table(result);  // first, so that it is seen even if nothing can be written
  const std::string text = result.dump(2) + "\n";
  if (arguments.output.empty())
    write_standard_output(text);
  else
    write_file_atomically(arguments.output, text);
}

}  // namespace

void add_evaluate_command(CLI::App& app) {
  constexpr int64_t kMost = int64_t{1} << 40;  // so that sums of positions and sizes fit
  const CLI::Range count(int64_t{1}, kMost);
  CLI::App* command =
      app.add_subcommand("evaluate", "Measure a model on its task: bits per byte by position, flip-flop error, accuracy by length, ...");
  auto arguments = std::make_shared<Arguments>();
  arguments->model.add_to(*command);
  command->add_option("-o,--output", arguments->output, "File for the JSON (default: stdout)");
  command->add_option("--recipe", arguments->recipe, "Where to find the data (default: the recipe the model was trained from)");
  command->add_option("--set", arguments->overrides, "Override a field of --recipe, section.field=value; may be repeated")->allow_extra_args(false);
  command->add_option("--sequences", arguments->num_sequences, "Synthetic tasks: sequences of each test set (default: the task's own number)")
      ->check(count);
  command->add_option("--windows", arguments->num_windows, "Text: windows of validation text")->check(count)->capture_default_str();
  command->add_option("--positions", arguments->positions, "Text: limits of the ranges of position; the last is the windows' length")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{0}, kMost))
      ->capture_default_str();
  command->footer(
      "Examples:\n"
      "  pathattn evaluate runs/flip-flop\n"
      "  pathattn evaluate runs/text --windows 64 --positions 0,256,1024,4096 --output evaluation.json\n"
      "A table goes to stderr, JSON to stdout.");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace pathattn
