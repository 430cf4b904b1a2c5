#include "sweep/results.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "base/json_file.h"

namespace pathattn {
namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;
namespace {

// The object in a file; an empty one if it is not there or damaged, as if the run had not come that far.
json read_if_whole(const fs::path& path) {
  if (!fs::exists(path)) return json::object();
  try {
    return read_json_object(path);
  } catch (const Error&) {
    return json::object();
  }
}

void collect_numbers(const json& values, const std::string& prefix, std::map<std::string, double>& numbers) {
  for (const auto& [name, value] : values.items()) {
    if (value.is_object()) collect_numbers(value, prefix + name + ".", numbers);
    if (value.is_number()) numbers[prefix + name] = value.get<double>();
  }
}

// "accuracy.12" as ("accuracy.", 12), so that it comes after "accuracy.2".
std::pair<std::string, int64_t> split_number(const std::string& name) {
  const size_t digits = name.find_last_not_of("0123456789") + 1;
  int64_t number = -1;
  std::from_chars(name.data() + digits, name.data() + name.size(), number);
  return {name.substr(0, digits), number};
}

void append_cell(std::string& table, const json& value) {
  const std::string text = value.is_null() ? "" : value.is_string() ? value.get<std::string>() : value.dump();
  if (text.find_first_of(",\"\n\r") == std::string::npos) {
    table += text;
    return;
  }
  table += '"';
  for (const char c : text) table.append(c == '"' ? 2 : 1, c);
  table += '"';
}

void append_line(std::string& table, const std::vector<json>& cells) {
  for (size_t i = 0; i < cells.size(); ++i) {
    if (i > 0) table += ',';
    append_cell(table, cells[i]);
  }
  table += '\n';
}

std::string csv_table(const std::vector<RunResult>& results) {
  constexpr const char* kTraining[] = {"step", "steps", "tokens", "seconds", "parameters", "loss"};
  const std::vector<std::string> names = result_names(results);
  std::string table;
  std::vector<json> header;
  for (const auto& [field, value] : results.front().run->fields) header.push_back(field);
  header.push_back("status");
  header.insert(header.end(), std::begin(kTraining), std::end(kTraining));
  header.insert(header.end(), names.begin(), names.end());
  header.push_back("error");
  append_line(table, header);
  for (const RunResult& result : results) {
    std::vector<json> cells;
    for (const auto& [field, value] : result.run->fields) cells.push_back(value);
    cells.push_back(result.status);
    for (const char* name : kTraining) cells.push_back(result.training.value(name, json()));
    for (const std::string& name : names) cells.push_back(result.results.contains(name) ? json(result.results.at(name)) : json());
    cells.push_back(result.error);
    append_line(table, cells);
  }
  return table;
}

}  // namespace

fs::path folder_of(const SweepRun& run, const fs::path& output) { return output / "runs" / run.name; }

void write_outcome(const SweepRun& run, const fs::path& output, const std::string& error) {
  const json outcome = {{"status", error.empty() ? "done" : "failed"}, {"error", error}, {"recipe", run.recipe}};
  write_file_atomically(folder_of(run, output) / "outcome.json", outcome.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

void remove_outcome(const SweepRun& run, const fs::path& output) { fs::remove(folder_of(run, output) / "outcome.json"); }

RunResult read_result(const SweepRun& run, const fs::path& output) {
  const fs::path folder = folder_of(run, output);
  const json outcome = read_if_whole(folder / "outcome.json");
  RunResult result{
      .run = &run, .status = "waiting", .error = {}, .training = read_if_whole(folder / "run.json"), .evaluation = json::object(), .results = {}};
  if (!result.training.empty()) result.status = "unfinished";
  result.training.erase("recipe");
  if (outcome.value("recipe", json()) != run.recipe) return result;
  if (outcome.value("status", json()) == "failed") {
    result.status = "failed";
    result.error = outcome.value("error", json()).is_string() ? outcome["error"].get<std::string>() : "";
    const LoggedProgress logged = logged_progress(run, output);  // run.json is of the training's begin
    if (logged.step > 0) result.training.update({{"step", logged.step}, {"tokens", logged.tokens}});
    return result;
  }
  result.evaluation = read_if_whole(folder / "evaluation.json");
  if (result.evaluation.empty()) return result;
  result.status = "done";
  result.evaluation.erase("run");
  collect_numbers(result.evaluation, "", result.results);
  return result;
}

LoggedProgress logged_progress(const SweepRun& run, const fs::path& output) {
  constexpr std::streamoff kTail = 4096;  // bytes; a line has some hundred
  std::ifstream file(folder_of(run, output) / "metrics.jsonl", std::ios::ate);
  if (!file) return {};
  file.seekg(std::max<std::streamoff>(0, static_cast<std::streamoff>(file.tellg()) - kTail));
  LoggedProgress progress;
  for (std::string line; std::getline(file, line);) {
    const json values = json::parse(line, nullptr, false);
    if (!values.is_object() || !values.contains("tokens")) continue;  // a validation, or a part of a line
    progress = {.step = values.at("step"), .tokens = values.at("tokens")};
  }
  return progress;
}

std::vector<std::string> result_names(const std::vector<RunResult>& results) {
  std::set<std::pair<std::string, int64_t>> names;
  for (const RunResult& result : results) {
    for (const auto& [name, value] : result.results) names.insert(split_number(name));
  }
  std::vector<std::string> sorted;
  for (const auto& [prefix, number] : names) sorted.push_back(number < 0 ? prefix : prefix + std::to_string(number));
  return sorted;
}

void write_tables(const std::vector<RunResult>& results, const fs::path& output, const ordered_json& totals) {
  ordered_json table = totals;
  table["runs"] = ordered_json::array();
  for (const RunResult& result : results) {
    ordered_json row = {{"name", result.run->name}, {"status", result.status}};
    if (!result.error.empty()) row["error"] = result.error;
    for (const auto& [field, value] : result.run->fields) row["fields"][field] = value;
    row["training"] = result.training;
    row["evaluation"] = result.evaluation;
    table["runs"].push_back(row);
  }
  write_file_atomically(output / "table.json", table.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n");
  write_file_atomically(output / "table.csv", csv_table(results));
}

}  // namespace pathattn
