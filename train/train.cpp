#include "train/train.h"

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/progress.h"
#include "base/say.h"
#include "data/stream.h"
#include "model/checkpoint.h"
#include "model/device.h"
#include "model/parameters.h"
#include "model/tensor_file.h"
#include "train/checkpoint.h"
#include "train/interrupt.h"
#include "train/loss.h"
#include "train/metrics.h"
#include "train/optimizer.h"
#include "train/run_folder.h"
#include "train/settings.h"
#include "train/step.h"
#include "train/version.h"

namespace pathattn {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What a recipe asks for.
struct Preparation {
  TrainSettings settings;
  at::Device device;
  std::unique_ptr<Stream> data;
  ModelConfig config;
  std::vector<Batch> validation;
};

Preparation prepare(Recipe& recipe, const std::string& device) {
  TrainSettings settings = TrainSettings::read(recipe);
  if (!device.empty()) settings.device = device;
  const at::Device parsed_device = parse_device(settings.device);
  std::unique_ptr<Stream> data = make_training_stream(recipe, settings.batch_size, settings.tokens, settings.seed);
  const ModelConfig config = model_config_from_recipe(recipe, data->vocabulary_size());
  recipe.refuse_unread();
  if (settings.patience > 0 && !data->has_curriculum())
    fail("{}: train.patience waits for a curriculum's rows to grow, and these data have none: leave it out", recipe.name());
  std::vector<Batch> validation;
  if (settings.validate_every > 0) validation = make_validation_batches(recipe, settings.batch_size, settings.tokens, settings.validation_batches);
  return {settings, parsed_device, std::move(data), config, std::move(validation)};
}

// What a run is made of and how far it is.
struct Run {
  fs::path folder;
  json recipe;
  TrainSettings settings;
  std::unique_ptr<Stream> data;
  std::vector<Batch> validation;
  LanguageModel model;
  AdamW optimizer;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  double seconds_before = 0;                   // spent by the processes that this one resumes
  int64_t step = 0, tokens = 0, grown_at = 0;  // grown_at: the last step that made a curriculum's rows longer
  double loss = NAN;                           // of the last step
  bool mastered = false;                       // stop_at_accuracy was reached
  fs::path checkpoint = {};                    // the newest one, empty if there is none yet

  bool gave_up() const { return settings.patience > 0 && !data->is_fully_grown() && step - grown_at >= settings.patience; }
  bool finished() const { return mastered || gave_up() || step >= settings.steps; }
  double seconds() const { return seconds_before + seconds_since(start); }
};

LanguageModel make_model(const ModelConfig& config, const TrainSettings& settings, at::Device device, const std::optional<Checkpoint>& checkpoint) {
  const at::ScalarType compute_type = settings.bf16 ? at::kBFloat16 : at::kFloat;
  if (!checkpoint) return LanguageModel(config, settings.seed, compute_type, device);
  LanguageModel model = load_model(checkpoint->folder, compute_type, device);
  if (!(model.config() == config))
    fail("the model in {} has another configuration than the recipe's: choose another --output", checkpoint->folder.string());
  return model;
}

void go_on_from(Run& run, const Checkpoint& checkpoint, bool allow_changes) {
  const json& trainer = checkpoint.trainer;
  run.data->seek(trainer.at("data"), allow_changes);
  run.optimizer.load(load_tensors(checkpoint.folder / "trainer.safetensors"), trainer.at("step"));
  trainer.at("step").get_to(run.step);
  trainer.at("tokens").get_to(run.tokens);
  trainer.at("loss").get_to(run.loss);
  trainer.at("seconds").get_to(run.seconds_before);
  trainer.at("mastered").get_to(run.mastered);
  trainer.at("grown_at").get_to(run.grown_at);
  run.checkpoint = checkpoint.folder;
}

json describe(const Run& run) {
  return {{"kind", name_of(run.model.config().kind)},
          {"parameters", num_parameters(run.model.config())},
          {"device", run.settings.device},
          {"seed", run.settings.seed},
          {"step", run.step},
          {"steps", run.settings.steps},
          {"tokens", run.tokens},
          {"seconds", std::round(10 * run.seconds()) / 10},
          {"loss", run.loss},
          {"mastered", run.mastered},
          {"grown_at", run.grown_at},
          {"gave_up", run.gave_up()},
          {"versions", {{"pathattn", version()}, {"commit", commit()}, {"torch", torch_version()}}},
          {"recipe", run.recipe}};
}

void save(Run& run) {
  json trainer = describe(run);
  trainer["data"] = run.data->position();
  run.checkpoint = save_checkpoint(run.folder, run.model, run.optimizer, trainer, run.settings.keep_checkpoints);
}

void record(const Run& run, const char* status) {
  json record = describe(run);
  record["status"] = status;
  write_record(run.folder, record);
}

[[noreturn]] void fail_diverged(const Run& run, const char* quantity, double value) {
  // fabs: a NaN whose sign is set would print as "-nan"
  fail("the {} is {} at step {}: the training diverges; lower train.learning_rate ({}) or lengthen train.warmup_steps ({}), and {}", quantity,
       std::fabs(value), run.step, run.settings.learning_rate, run.settings.warmup_steps,
       run.checkpoint.empty() ? "start again in another --output"
                              : fmt::format("go on from {} with --resume --allow-changes", run.checkpoint.string()));
}

void train_one_step(Run& run, TrainingStep& training_step, Metrics& metrics) {
  const auto start = std::chrono::steady_clock::now();
  const Batch batch = run.data->next();
  const double learning_rate = run.settings.learning_rate_at(++run.step);
  const StepResult result = training_step(batch, learning_rate);
  run.loss = result.loss;
  if (!std::isfinite(run.loss)) fail_diverged(run, "loss", run.loss);
  if (!std::isfinite(result.gradient_norm)) fail_diverged(run, "gradient's norm", result.gradient_norm);
  if (run.data->report_accuracy(result.last_accuracy)) run.grown_at = run.step;
  run.mastered = run.settings.stop_at_accuracy > 0 && batch.tokens.size(1) == run.settings.tokens && result.accuracy >= run.settings.stop_at_accuracy;
  run.tokens += batch.tokens.numel();
  if (run.step % run.settings.log_every != 0 && !run.finished()) return;
  json line = {{"step", run.step},
               {"loss", run.loss},
               {"accuracy", result.accuracy},
               {"learning_rate", learning_rate},
               {"gradient_norm", result.gradient_norm},
               {"tokens", run.tokens},
               {"tokens_per_s", std::round(batch.tokens.numel() / seconds_since(start))}};
  if (run.data->has_curriculum()) line.update({{"tokens_per_row", batch.tokens.size(1)}, {"last_accuracy", result.last_accuracy}});
  metrics.write(line);
}

// Until the last step or a signal, which is returned.
int train_to_the_end(Run& run) {
  const auto due = [&run](int64_t every) { return every > 0 && run.step % every == 0; };
  Metrics metrics(run.folder / "metrics.jsonl", run.step);
  Progress progress("training", run.settings.steps, "steps", run.step);
  Interrupt interrupt;
  TrainingStep training_step(run.model, run.optimizer, run.settings.accumulation);
  while (!run.finished()) {
    train_one_step(run, training_step, metrics);
    progress.update(run.step, fmt::format("loss {:.4f}", run.loss));
    if (due(run.settings.validate_every)) metrics.write({{"step", run.step}, {"validation_loss", mean_loss(run.model, run.validation)}});
    const bool last = run.finished() || interrupt.signal() != 0;
    if (last || due(run.settings.checkpoint_every)) save(run);
    if (last) break;
  }
  return interrupt.signal();
}

}  // namespace

TrainResult train(Recipe recipe, const fs::path& folder, const TrainOptions& options) {
  Preparation prepared = prepare(recipe, options.device);
  const TrainSettings& settings = prepared.settings;
  const RunLock lock(folder);
  if (!options.resume) refuse_used_folder(folder);
  const std::optional<Checkpoint> checkpoint = options.resume ? newest_checkpoint(folder) : std::nullopt;
  if (checkpoint && !options.allow_changes) refuse_changed_recipe(checkpoint->trainer.at("recipe"), recipe.json());
  LanguageModel model = make_model(prepared.config, settings, prepared.device, checkpoint);
  AdamW optimizer(model, settings);
  Run run{folder, recipe.json(), settings, std::move(prepared.data), std::move(prepared.validation), std::move(model), std::move(optimizer)};
  if (checkpoint) go_on_from(run, *checkpoint, options.allow_changes);
  if (run.finished()) {
    say("{}: finished already, {} steps{}\n", folder.string(), run.step,
        run.mastered    ? "; the task was mastered"
        : run.gave_up() ? "; rows no longer grew"
                        : "; raise train.steps to go on");
    return {.step = run.step};
  }
  if (checkpoint) say("{}: continuing from step {}\n", folder.string(), run.step);

  record(run, "running");
  const int signal = train_to_the_end(run);
  const bool finished = run.finished();
  record(run, finished ? "finished" : "interrupted");
  say("{}: {} after {} steps, {:.0f} s, loss {:.4f}; saved {}\n", folder.string(), finished ? "finished" : "interrupted", run.step, run.seconds(),
      run.loss, run.checkpoint.string());
  return {.step = run.step, .signal = finished ? 0 : signal};
}

void check_recipe(Recipe recipe, const std::string& device) { prepare(recipe, device); }

Recipe recipe_of_run(const fs::path& run) { return Recipe::from_json(recorded_recipe(run), (run / "run.json").string()); }

}  // namespace pathattn
