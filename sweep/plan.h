// What a sweep is: a TOML file that names a recipe and, in [grid], lists of values for its fields. Every combination is a run.
// docs/sweeps.md has the format.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/recipe.h"

namespace pathattn {

// A picture of results against a field, or against the results' own names. docs/sweeps.md.
struct Figure {
  std::string title;
  std::vector<std::string> y;  // results; "accuracy" stands for "accuracy.1", "accuracy.2", ... where those are there
  std::string x, line, panel;  // fields of the grid; x empty: the results' names; panel empty: one panel
  std::string x_label, y_label;
};

struct SweepRun {
  std::string name;                                            // of its folder: "kind=path,seed=1"
  std::vector<std::pair<std::string, nlohmann::json>> fields;  // of the grid, with this run's values, in order of name
  std::vector<std::string> overrides;                          // what `pathattn train` gets with --set
  nlohmann::json recipe;                                       // with the overrides
  int64_t steps;
  std::string device, precision;
};

struct SweepPlan {
  std::filesystem::path recipe;
  std::vector<SweepRun> runs;  // train.seed varies slowest, so that the first part of a sweep is one whole table
  std::vector<Figure> figures;

  // Reads a sweep's file and checks every run's recipe. `overrides`, "section.field=value", come before the grid. Error naming the file and the
  // field if anything is unknown or out of range, or `device` (if not empty, it replaces the recipe's) cannot be used.
  static SweepPlan load(const std::filesystem::path& path, const std::vector<std::string>& overrides, const std::string& device);
};

}  // namespace pathattn
