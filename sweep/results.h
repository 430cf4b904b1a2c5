// What the runs of a sweep left in their folders, and the tables made of it. All of it is read from files, so that a sweep may end at any moment.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sweep/plan.h"

namespace pathattn {

std::filesystem::path folder_of(const SweepRun& run, const std::filesystem::path& output);  // output/runs/NAME

// How a run of this very recipe ended, in the run's folder: outcome.json. `error` empty: it was trained and evaluated.
void write_outcome(const SweepRun& run, const std::filesystem::path& output, const std::string& error);
void remove_outcome(const SweepRun& run, const std::filesystem::path& output);

struct RunResult {
  const SweepRun* run;
  std::string status;                     // done, failed, unfinished (it has begun) or waiting
  std::string error;                      // why it failed
  nlohmann::json training, evaluation;    // run.json without the recipe, evaluation.json; empty objects as long as there are none
  std::map<std::string, double> results;  // numbers of a done run's evaluation by name: "accuracy.4"
};

RunResult read_result(const SweepRun& run, const std::filesystem::path& output);

// The step that a run has logged last and the tokens read until then; zeros if it has logged none.
struct LoggedProgress {
  int64_t step = 0, tokens = 0;
};
LoggedProgress logged_progress(const SweepRun& run, const std::filesystem::path& output);

// Names of all results in the order of their columns: numbers at their end rise.
std::vector<std::string> result_names(const std::vector<RunResult>& results);

// output/table.json, which begins with the fields of `totals`, and output/table.csv.
void write_tables(const std::vector<RunResult>& results, const std::filesystem::path& output, const nlohmann::ordered_json& totals);

}  // namespace pathattn
