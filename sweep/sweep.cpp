#include "sweep/sweep.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "base/json_file.h"
#include "base/progress.h"
#include "base/say.h"
#include "sweep/child_process.h"
#include "sweep/figure.h"
#include "sweep/results.h"
#include "train/interrupt.h"
#include "train/run_folder.h"

namespace pathattn {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{200};

bool holds_ended_run(const fs::path& output) {
  std::error_code error;  // there may be no runs/
  for (const fs::directory_entry& run : fs::directory_iterator(output / "runs", error)) {
    if (fs::exists(run.path() / "outcome.json", error)) return true;
  }
  return false;
}

void refuse_foreign_folder(const fs::path& output) {
  if (fs::is_empty(output) || fs::exists(output / "table.json") || holds_ended_run(output)) return;
  fail("{} is not empty and holds no sweep: choose another --output", output.string());
}

void refuse_other_recipe(const SweepRun& run, const fs::path& folder) {
  if (!fs::exists(folder / "run.json")) return;
  try {
    refuse_changed_recipe(recorded_recipe(folder), run.recipe);
  } catch (const Error& error) {
    fail("{} was made by another recipe: choose another --output, or remove the folder to train it anew ({})", folder.string(), error.what());
  }
}

// The last line that a run's processes printed.
std::string last_words(const fs::path& log) {
  std::istringstream lines(read_file(log));
  std::string last;
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) last = line;
  }
  constexpr std::string_view kName = "pathattn: ";
  return last.starts_with(kName) ? last.substr(kName.size()) : last;
}

class Sweep {
 public:
  Sweep(const SweepPlan& plan, const SweepOptions& options) : plan_(plan), options_(options) {
    for (const SweepRun& run : plan.runs) {
      results_.push_back(read_result(run, options.output));
      logged_.push_back(logged_progress(run, options.output));
      ended_.push_back(results_.back().status == "done");
      if (ended_.back()) continue;
      refuse_other_recipe(run, folder_of(run, options.output));
      waiting_.push_back(results_.size() - 1);
    }
    read_earlier_totals();
    tokens_before_ = tokens_logged();
  }

  SweepResult run() {
    const size_t num_skipped = results_.size() - waiting_.size();
    if (num_skipped > 0) say("{} of {} runs are done already\n", num_skipped, results_.size());
    write();  // from here on the folder is known as a sweep's
    const int signal = work();
    write();
    SweepResult result{.signal = signal};
    for (const RunResult& run : results_) {
      if (run.status == "done") ++result.num_done;
      if (run.status != "failed") continue;
      ++result.num_failed;
      say("{} failed: {}\n", folder_of(*run.run, options_.output).string(), run.error);
    }
    if (signal == 0) {
      for (const std::string& line : missing_results(plan_.figures, results_)) {
        ++result.num_missing;
        say("{}\n", line);
      }
    }
    const auto [seconds, tokens] = totals();
    say("{} of {} runs done, {} failed; {:.0f} s in all, {:.3g} trained tokens/s; {}\n", result.num_done, results_.size(), result.num_failed, seconds,
        static_cast<double>(tokens) / seconds, (options_.output / "table.csv").string());
    return result;
  }

 private:
  struct Job {
    size_t run;  // in plan_.runs and results_
    bool evaluates = false;
    std::unique_ptr<ChildProcess> child;
  };

  // The signal that ended it, 0 if all runs have ended.
  int work() {
    Interrupt interrupt;
    Progress progress("sweep", total_steps(), "steps", steps_done());
    bool stopping = false;
    while (!jobs_.empty() || (!waiting_.empty() && !stopping)) {
      while (!stopping && !waiting_.empty() && jobs_.size() < static_cast<size_t>(options_.side_by_side)) start_next();
      std::this_thread::sleep_for(kBetweenLooks);
      if (!stopping && interrupt.signal() != 0) {
        stopping = true;
        for (Job& job : jobs_) job.child->interrupt();
      }
      for (size_t i = jobs_.size(); i-- > 0;) {
        logged_[jobs_[i].run] = logged_progress(plan_.runs[jobs_[i].run], options_.output);
        if (jobs_[i].child->status()) go_on_with(i, stopping);
      }
      progress.update(steps_done(), describe_progress());
    }
    return waiting_.empty() && !was_cut_ ? 0 : interrupt.signal();
  }

  void start_next() {
    Job job{.run = waiting_.front(), .child = {}};
    waiting_.pop_front();
    const SweepRun& run = plan_.runs[job.run];
    fs::create_directories(folder_of(run, options_.output));
    remove_outcome(run, options_.output);
    results_[job.run] = read_result(run, options_.output);
    job.child = start(job);
    jobs_.push_back(std::move(job));
    write();
  }

  std::unique_ptr<ChildProcess> start(const Job& job) const {
    const SweepRun& run = plan_.runs[job.run];
    const fs::path folder = folder_of(run, options_.output);
    std::vector<std::string> command = {options_.program, "--threads", std::to_string(options_.threads)};
    if (job.evaluates) {
      command.insert(command.end(),
                     {"evaluate", folder, "--output", folder / "evaluation.json", "--precision", run.precision, "--recipe", plan_.recipe});
    } else {
      command.insert(command.end(), {"train", plan_.recipe, "--output", folder, "--resume"});
    }
    command.insert(command.end(), {"--device", run.device});
    for (const std::string& assignment : run.overrides) command.insert(command.end(), {"--set", assignment});
    return std::make_unique<ChildProcess>(std::move(command), folder / "log.txt");
  }

  // A job whose process has ended: to its evaluation, or to its end.
  void go_on_with(size_t index, bool stopping) {
    Job& job = jobs_[index];
    const int status = *job.child->status();
    if (status == 0 && !job.evaluates && !stopping) {
      job.evaluates = true;
      job.child = start(job);
      return;
    }
    const SweepRun& run = plan_.runs[job.run];
    const bool cut = stopping && (status != 0 || !job.evaluates);
    was_cut_ = was_cut_ || cut;
    ended_[job.run] = !cut;
    if (!cut) write_outcome(run, options_.output, status == 0 ? "" : why_failed(run, status));
    results_[job.run] = read_result(run, options_.output);
    jobs_.erase(jobs_.begin() + static_cast<int64_t>(index));
    write();
  }

  std::string why_failed(const SweepRun& run, int status) const {
    if (status > 128) return fmt::format("it was ended by signal {}", status - 128);
    const std::string words = last_words(folder_of(run, options_.output) / "log.txt");
    return words.empty() ? fmt::format("its process ended with status {}", status) : words;
  }

  int64_t total_steps() const {
    int64_t steps = 0;
    for (const SweepRun& run : plan_.runs) steps += run.steps;
    return steps;
  }

  // Runs that have ended count as whole: no more of their steps are to come.
  int64_t steps_done() const {
    int64_t steps = 0;
    for (size_t i = 0; i < results_.size(); ++i) steps += ended_[i] ? plan_.runs[i].steps : std::min(plan_.runs[i].steps, logged_[i].step);
    return steps;
  }

  int64_t tokens_logged() const {
    int64_t tokens = 0;
    for (const LoggedProgress& logged : logged_) tokens += logged.tokens;
    return tokens;
  }

  std::string describe_progress() const {
    const auto num_ended = std::count(ended_.begin(), ended_.end(), true);
    const double tokens_per_s = static_cast<double>(tokens_logged() - tokens_before_) / seconds_here();
    return fmt::format("{}/{} runs, {} running, {:.3g} tokens/s", num_ended, results_.size(), jobs_.size(), tokens_per_s);
  }

  double seconds_here() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

  // Seconds that sweeps have worked in this folder, and tokens trained meanwhile.
  std::pair<double, int64_t> totals() const { return {earlier_seconds_ + seconds_here(), earlier_tokens_ + tokens_logged() - tokens_before_}; }

  void read_earlier_totals() {
    const fs::path table = options_.output / "table.json";
    if (!fs::exists(table)) return;
    const json earlier = read_json_object(table);
    if (earlier.contains("seconds") && earlier["seconds"].is_number()) earlier_seconds_ = earlier["seconds"];
    if (earlier.contains("tokens") && earlier["tokens"].is_number()) earlier_tokens_ = earlier["tokens"];
  }

  void write() const {
    const auto [seconds, tokens] = totals();
    write_tables(
        results_, options_.output,
        {{"side_by_side", options_.side_by_side}, {"threads", options_.threads}, {"seconds", std::round(10 * seconds) / 10}, {"tokens", tokens}});
    write_figures(plan_.figures, results_, options_.output);
  }

  const SweepPlan& plan_;
  const SweepOptions& options_;
  std::vector<RunResult> results_;  // of plan_.runs, as the next two
  std::vector<LoggedProgress> logged_;
  std::vector<bool> ended_;  // in this sweep or an earlier one
  std::deque<size_t> waiting_;
  std::vector<Job> jobs_;
  bool was_cut_ = false;  // the signal came before a run's end
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double earlier_seconds_ = 0;
  int64_t earlier_tokens_ = 0, tokens_before_ = 0;
};

}  // namespace

SweepResult run_sweep(const SweepPlan& plan, const SweepOptions& options) {
  const RunLock lock(options.output);
  refuse_foreign_folder(options.output);
  return Sweep(plan, options).run();
}

}  // namespace pathattn
