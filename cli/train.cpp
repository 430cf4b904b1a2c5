// pathattn train
#include "train/train.h"

#include <cerrno>
#include <csignal>

#include "base/error.h"
#include "base/say.h"
#include "cli/commands.h"
#include "cli/model.h"

namespace pathattn {
namespace {

struct Arguments {
  std::string recipe, output;
  std::vector<std::string> overrides;
  TrainOptions options;
};

void run(const Arguments& arguments) {
  if (arguments.recipe.empty() && !arguments.overrides.empty()) fail("--set needs a RECIPE to change: name it, or leave out --set");
  if (arguments.recipe.empty() && !arguments.options.resume) fail("a new run needs a RECIPE, for example recipes/flip-flop.toml");
  const Recipe recipe = arguments.recipe.empty() ? recipe_of_run(arguments.output) : Recipe::load(arguments.recipe, arguments.overrides);
  std::signal(SIGPIPE, SIG_IGN);  // a log that nobody reads any more ends no training
  const TrainResult result = train(recipe, arguments.output, arguments.options);
  if (result.signal == 0) return;
  say("continue with: {} train --output {} --resume\n", program_invocation_name, arguments.output);
  throw CLI::RuntimeError(128 + result.signal);
}

}  // namespace

void add_train_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("train", "Train a model from a recipe; writes metrics and checkpoints into a folder");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("RECIPE", arguments->recipe, "TOML file; docs/training.md lists its fields. Optional with --resume");
  command->add_option("-o,--output", arguments->output, "Folder of the run")->required();
  command->add_option("--set", arguments->overrides, "Override a field of the recipe, section.field=value; may be repeated")->allow_extra_args(false);
  command->add_flag("--resume", arguments->options.resume, "Continue from the newest checkpoint, exactly as if there had been no stop");
  command->add_option("--device", arguments->options.device, std::string(kDeviceHelp) + " (default: the recipe's train.device, or cpu)");
  command->add_flag("--allow-changes", arguments->options.allow_changes, "With --resume: go on although the data or the recipe changed");
  command->footer(
      "Examples:\n"
      "  pathattn train recipes/flip-flop.toml --output runs/flip-flop\n"
      "  pathattn train recipes/flip-flop.toml --output runs/rope --set model.kind=rope --set train.steps=800\n"
      "  pathattn train recipes/flip-flop.toml --output runs/gpu --device cuda --set train.precision=bf16\n"
      "  pathattn train --output runs/flip-flop --resume\n"
      "Ctrl-C saves a checkpoint first; a second Ctrl-C stops at once.");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace pathattn
