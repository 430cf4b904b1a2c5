// pathattn construct
#include "base/error.h"
#include "base/files.h"
#include "cli/commands.h"
#include "construct/explicit_model.h"
#include "model/checkpoint.h"

namespace pathattn {
namespace {

struct Arguments {
  std::string name, output;
};

void run(const Arguments& arguments) {
  if (std::filesystem::exists(arguments.output)) fail("{} exists already: choose another --output", arguments.output);
  const LanguageModel model = explicit_model(arguments.name);
  create_folder_atomically(arguments.output, [&](const std::filesystem::path& folder) { save_model(model, folder); });
}

}  // namespace

void add_construct_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("construct", "Write a model whose weights solve a task exactly, without training");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("NAME", arguments->name, "The task")->required()->check(CLI::IsMember(explicit_model_names()));
  command->add_option("-o,--output", arguments->output, "Folder to write: config.json and model.safetensors")->required();
  command->footer(
      "Example:\n"
      "  pathattn construct swap_identity --output runs/swap-identity\n"
      "  pathattn evaluate runs/swap-identity --recipe recipes/state-tracking/swap-identity.toml --set train.tokens=32768 --sequences 2 "
      "--precision bf16\n"
      "construct/explicit_model.h says how the weights work.");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace pathattn
