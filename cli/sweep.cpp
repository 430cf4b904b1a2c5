// pathattn sweep
#include "sweep/sweep.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <csignal>

#include "cli/commands.h"
#include "cli/model.h"

namespace pathattn {
namespace {

struct Arguments {
  std::string sweep, device;
  std::vector<std::string> overrides;
  SweepOptions options;
};

void run(Arguments& arguments) {
  const SweepPlan plan = SweepPlan::load(arguments.sweep, arguments.overrides, arguments.device);
  arguments.options.program = std::filesystem::read_symlink("/proc/self/exe");
  arguments.options.threads = std::max(1, at::get_num_threads() / static_cast<int>(arguments.options.side_by_side));
  std::signal(SIGPIPE, SIG_IGN);  // a log that nobody reads any more ends no sweep
  const SweepResult result = run_sweep(plan, arguments.options);
  if (result.signal != 0) throw CLI::RuntimeError(128 + result.signal);
  if (result.num_failed > 0 || result.num_missing > 0) throw CLI::RuntimeError(1);
}

}  // namespace

void add_sweep_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("sweep", "Train and evaluate a grid of runs, several side by side; writes one table and its figures");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("SWEEP", arguments->sweep, "TOML file that names a recipe and lists values of its fields; docs/sweeps.md")->required();
  command->add_option("-o,--output", arguments->options.output, "Folder of the sweep; one that holds this sweep is gone on with")->required();
  command->add_option("--set", arguments->overrides, "Override a field of the recipe in every run, section.field=value; may be repeated")
      ->allow_extra_args(false);
  command->add_option("--device", arguments->device, std::string(kDeviceHelp) + " (default: the recipe's train.device, or cpu)");
  command->add_option("--side-by-side", arguments->options.side_by_side, "Runs at a time, which share the CPU threads out")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  command->footer(
      "Examples:\n"
      "  pathattn sweep recipes/state-tracking/sweeps/flip-flop.toml --output runs/flip-flop --side-by-side 2\n"
      "  pathattn sweep recipes/state-tracking/sweeps/mqrar.toml --output runs/mqrar --device cuda --side-by-side 8\n"
      "Ctrl-C lets every run save a checkpoint; the same command goes on from there.\n"
      "Exit status 1: some runs failed (see table.csv), or a figure names a result that no run has.");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace pathattn
