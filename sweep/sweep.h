// Trains and evaluates the runs of a plan, several at a time. Each is a `pathattn train` and then a `pathattn evaluate` in a process of its own: its
// bits are those of the same commands given by hand, what stops one run does not reach another, and no two wait for each other (in one process all
// backward passes on a GPU share one thread of the autograd engine).
//
//   output/table.json, table.csv, figure-1.svg ...   written anew each time that a run ends
//   output/runs/NAME/                                files of the run (docs/training.md), and
//     log.txt, evaluation.json, outcome.json         what its processes printed, its results, how it ended
#pragma once

#include <cstdint>
#include <filesystem>

#include "sweep/plan.h"

namespace pathattn {

struct SweepOptions {
  std::filesystem::path program, output;
  int64_t side_by_side = 1;
  int threads = 1;  // of each run
};

struct SweepResult {
  int64_t num_done = 0, num_failed = 0;
  int64_t num_missing = 0;  // results that figures name and no run has
  int signal = 0;           // SIGINT or SIGTERM if it ended the sweep early
};

// Goes on where an earlier sweep in `output` stopped: what is done is skipped, what has begun is resumed, what failed is tried again. Error, before
// any run starts, if `output` holds something else or runs of another recipe, or another sweep works there.
SweepResult run_sweep(const SweepPlan& plan, const SweepOptions& options);

}  // namespace pathattn
