// The program's commands. Each function adds one to `app`, with its options, help and examples; parsing the command line then runs it.
#pragma once

#include <CLI/CLI.hpp>

namespace pathattn {

void add_train_command(CLI::App& app);
void add_evaluate_command(CLI::App& app);
void add_generate_command(CLI::App& app);
void add_logits_command(CLI::App& app);
void add_construct_command(CLI::App& app);
void add_sweep_command(CLI::App& app);

}  // namespace pathattn
