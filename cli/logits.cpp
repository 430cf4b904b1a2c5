// pathattn logits
#include "base/error.h"
#include "cli/commands.h"
#include "cli/model.h"
#include "model/tensor_file.h"

#include <ATen/core/grad_mode.h>

namespace pathattn {
namespace {

struct Arguments {
  ModelOptions model;
  std::string input, output;
};

void run(const Arguments& arguments) {
  at::NoGradGuard no_gradients;
  const auto tensors = load_tensors(arguments.input);
  const auto found = tensors.find("input_ids");
  if (found == tensors.end()) fail("{}: the tensor input_ids is missing", arguments.input);
  const at::Tensor& tokens_BT = found->second;
  if (tokens_BT.scalar_type() != at::kLong || tokens_BT.dim() != 2 || tokens_BT.numel() == 0)
    fail("{}: input_ids must be I64 of shape [batch, tokens] and not empty", arguments.input);
  const LanguageModel model = arguments.model.load(find_model_directory(arguments.model.path));
  model.check_tokens(tokens_BT, arguments.input + ": input_ids");
  const at::Tensor logits_BTV = model.forward(tokens_BT);
  check_logits(logits_BTV);
  save_tensors(arguments.output, {{"logits", logits_BTV}});
}

}  // namespace

void add_logits_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("logits", "Write a model's logits for given token ids, to check a checkpoint");
  auto arguments = std::make_shared<Arguments>();
  arguments->model.add_to(*command);
  command->add_option("--input", arguments->input, "safetensors file with input_ids, I64 [batch, tokens]")->required();
  command->add_option("--output", arguments->output, "safetensors file to write: logits, F32 [batch, tokens, vocabulary]")->required();
  command->footer(
      "Example:\n"
      "  pathattn logits tests/golden/model_path --input tests/golden/model_path/io.safetensors --output logits.safetensors");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace pathattn
