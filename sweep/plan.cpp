#include "sweep/plan.h"

#include <algorithm>
#include <cctype>
#include <set>

#include "base/error.h"
#include "train/settings.h"
#include "train/train.h"

namespace pathattn {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

constexpr size_t kMostRuns = 10'000;

using Fields = std::vector<std::pair<std::string, json>>;

// "seed=1" of ("train.seed", 1), fit for a folder's name.
std::string short_name(const std::string& field, const json& value) {
  std::string name = field.substr(field.rfind('.') + 1) + "=" + (value.is_string() ? value.get<std::string>() : value.dump());
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && std::string_view("=._+-").find(c) == std::string_view::npos) c = '_';
  }
  return name;
}

// Numbers are equal however they are written: 1 and 1.0 would train the same run under two names.
void refuse_equal_values(const std::string& where, const json& values) {
  for (auto value = values.begin(); value != values.end(); ++value) {
    const auto equal = std::find(values.begin(), value, *value);
    if (equal != value) fail("{} has {} and {}, which are equal: give each value once", where, equal->dump(), value->dump());
  }
}

Fields read_grid(Recipe& sweep) {
  Fields grid = sweep.fields("grid");
  if (grid.empty()) fail("{}: there is no [grid]: write lists of values, for example train.seed = [1, 2, 3]", sweep.name());
  size_t num_runs = 1;
  for (const auto& [field, values] : grid) {
    if (!values.is_array() || values.empty()) fail("{}: grid.{} = {} must be a list of values", sweep.name(), field, values.dump());
    num_runs *= values.size();
    if (num_runs > kMostRuns) fail("{}: the grid has more than {} runs: split it", sweep.name(), kMostRuns);
    refuse_equal_values(fmt::format("{}: grid.{}", sweep.name(), field), values);
  }
  return grid;
}

// Every combination, the first field varying slowest.
std::vector<Fields> combinations(const Fields& grid) {
  std::vector<Fields> all = {{}};
  for (const auto& [field, values] : grid) {
    std::vector<Fields> longer;
    for (const Fields& fields : all) {
      for (const json& value : values) {
        longer.push_back(fields);
        longer.back().emplace_back(field, value);
      }
    }
    all = std::move(longer);
  }
  return all;
}

Figure read_figure(Recipe& table, const Fields& grid) {
  Figure figure{.title = table.string("title", ""),
                .y = table.strings("y", {}),
                .x = table.string("x", ""),
                .line = table.string("line", ""),
                .panel = table.string("panel", ""),
                .x_label = table.string("x_label", ""),
                .y_label = table.string("y_label", "")};
  table.refuse_unread();
  if (figure.y.empty()) fail("{}: y is missing: name a result, for example y = \"accuracy\"", table.name());
  std::string known;
  for (const auto& [field, list] : grid) known += (known.empty() ? "" : ", ") + field;
  for (const std::string& field : {figure.x, figure.line, figure.panel}) {
    const bool in_grid = std::any_of(grid.begin(), grid.end(), [&](const auto& entry) { return entry.first == field; });
    if (!field.empty() && !in_grid) fail("{}: {} is no field of the grid, which has {}", table.name(), field, known);
  }
  return figure;
}

// A run of `plan` but for its recipe, which is read and checked below.
SweepRun name_run(Fields fields, const std::vector<std::string>& overrides) {
  SweepRun run{.name = {}, .fields = std::move(fields), .overrides = overrides, .recipe = {}, .steps = 0, .device = {}, .precision = {}};
  std::sort(run.fields.begin(), run.fields.end());
  for (const auto& [field, value] : run.fields) {
    run.name += (run.name.empty() ? "" : ",") + short_name(field, value);
    run.overrides.push_back(field + "=" + value.dump());
  }
  return run;
}

void read_recipe(SweepRun& run, const fs::path& file, const std::string& device) {
  Recipe recipe = Recipe::load(file, run.overrides);
  check_recipe(recipe, device);
  run.recipe = recipe.json();
  const TrainSettings settings = TrainSettings::read(recipe);
  run.steps = settings.steps;
  run.device = device.empty() ? settings.device : device;
  run.precision = settings.bf16 ? "bf16" : "fp32";
}

}  // namespace

SweepPlan SweepPlan::load(const fs::path& path, const std::vector<std::string>& overrides, const std::string& device) {
  Recipe sweep = Recipe::load(path);
  const std::string recipe = sweep.string("recipe", "");
  Fields grid = read_grid(sweep);
  SweepPlan plan{.recipe = (path.parent_path() / recipe).lexically_normal(), .runs = {}, .figures = {}};
  for (Recipe& table : sweep.tables("figure")) plan.figures.push_back(read_figure(table, grid));
  sweep.refuse_unread();
  if (recipe.empty()) fail("{}: recipe is missing: name a file beside it, for example recipe = \"flip-flop.toml\"", sweep.name());
  for (const auto& [field, values] : grid) {
    for (const std::string& assignment : overrides) {
      if (assignment.starts_with(field + "=")) fail("cannot override {}: it is in the grid of {}", field, sweep.name());
    }
  }

  std::stable_partition(grid.begin(), grid.end(), [](const auto& entry) { return entry.first == "train.seed"; });
  std::set<std::string> names;
  for (Fields& fields : combinations(grid)) {
    SweepRun run = name_run(std::move(fields), overrides);
    if (!names.insert(run.name).second) fail("{}: two runs of the grid have the name {}: give each value once", sweep.name(), run.name);
    try {
      read_recipe(run, plan.recipe, device);
    } catch (const Error& error) {
      fail("{}, run {}: {}", sweep.name(), run.name, error.what());
    }
    plan.runs.push_back(std::move(run));
  }
  return plan;
}

}  // namespace pathattn
