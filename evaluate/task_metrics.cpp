#include "evaluate/task_metrics.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <string_view>

#include "base/error.h"
#include "base/progress.h"

namespace pathattn {
namespace {

using json = nlohmann::ordered_json;

constexpr uint64_t kTestSeed = 0;
constexpr int64_t kTokensAtOnce = 16384;

int64_t rows_at_once(const SyntheticTask& task) { return std::max<int64_t>(1, kTokensAtOnce / task.tokens()); }

// [B, T] on the CPU.
at::Tensor likeliest_tokens(const LanguageModel& model, const at::Tensor& tokens_BT) {
  at::NoGradGuard no_grad;
  const at::Tensor logits_BTV = model.forward(tokens_BT);
  check_logits(logits_BTV);
  return logits_BTV.argmax(-1).cpu();
}

void check_vocabulary(const LanguageModel& model, const SyntheticTask& task) {
  if (model.config().vocabulary_size == task.vocabulary_size()) return;
  fail("the model has {} tokens, the task {}: evaluate it on what it was trained on", model.config().vocabulary_size, task.vocabulary_size());
}

// percent() for a result, where nothing counted is no result.
double percent_of(const ErrorCount& errors, std::string_view what) {
  if (errors.counted == 0) fail("no {} in these sequences: raise --sequences or train.tokens", what);
  return errors.percent();
}

void for_test_batches(const SyntheticTask& task, const char* name, int64_t num_sequences, const std::function<void(const Batch&)>& count) {
  Progress progress(name, num_sequences, "sequences");
  for (int64_t first = 0; first < num_sequences; first += rows_at_once(task)) {
    const int64_t rows = std::min(rows_at_once(task), num_sequences - first);
    count(task.sequences(kTestSeed, kTest, first, rows));
    progress.update(first + rows);
  }
}

}  // namespace

ErrorCount count_errors(const LanguageModel& model, const Batch& batch) {
  const at::Tensor counted_BT = batch.targets.ne(kIgnoreTarget);
  const at::Tensor wrong_BT = likeliest_tokens(model, batch.tokens).ne(batch.targets).logical_and(counted_BT);
  return {.wrong = wrong_BT.sum().item<int64_t>(), .counted = counted_BT.sum().item<int64_t>()};
}

json evaluate_flip_flop(const LanguageModel& model, const FlipFlop& language, int64_t test_reads, int64_t num_sequences) {
  check_vocabulary(model, language);
  json results, reads;
  for (const FlipFlopTestSet& set : kFlipFlopTestSets) {
    const FlipFlop test_language(set.p_ignore, language.tokens());
    const int64_t least_reads = num_sequences > 0 ? 0 : test_reads, rows = rows_at_once(language);
    Progress progress(set.name, num_sequences > 0 ? num_sequences : test_reads, num_sequences > 0 ? "sequences" : "reads");
    ErrorCount errors;
    for (int64_t first = 0; first < num_sequences || errors.counted < least_reads; first += rows) {
      const int64_t count = num_sequences > 0 ? std::min(rows, num_sequences - first) : rows;
      const ErrorCount more = count_errors(model, test_language.sequences(kTestSeed, kTest, first, count));
      errors = {.wrong = errors.wrong + more.wrong, .counted = errors.counted + more.counted};
      progress.update(num_sequences > 0 ? first + count : std::min(errors.counted, test_reads),
                      errors.counted == 0 ? "" : fmt::format("error {:.3f} %", errors.percent()));
    }
    results[set.name] = percent_of(errors, "read");
    reads[set.name] = errors.counted;
  }
  results["reads"] = reads;
  return results;
}

json evaluate_word_problem(const LanguageModel& model, const WordProblem& problem, int64_t num_sequences) {
  check_vocabulary(model, problem);
  const int64_t num_words = num_sequences > 0 ? num_sequences : 10'000;
  at::Tensor right_T = at::zeros({problem.tokens()}, at::kLong);
  for_test_batches(problem, "words", num_words,
                   [&](const Batch& batch) { right_T += likeliest_tokens(model, batch.tokens).eq(batch.targets).sum(0); });
  json accuracy;
  for (int64_t position = problem.prefix(); position < problem.tokens(); ++position) {
    accuracy[fmt::format("{}", position - problem.prefix() + 1)] = 100.0 * right_T[position].item<double>() / static_cast<double>(num_words);
  }
  return {{"words", num_words}, {"accuracy", accuracy}};
}

json evaluate_mqrar(const LanguageModel& model, const Mqrar& task, int64_t num_sequences) {
  check_vocabulary(model, task);
  ErrorCount errors;
  for_test_batches(task, "recall", num_sequences > 0 ? num_sequences : 400, [&](const Batch& batch) {
    const ErrorCount more = count_errors(model, batch);
    errors = {.wrong = errors.wrong + more.wrong, .counted = errors.counted + more.counted};
  });
  return {{"accuracy", 100 - percent_of(errors, "key that recurs")}, {"recalls", errors.counted}};
}

json evaluate_swap_identity(const LanguageModel& model, const SwapIdentity& task, int64_t num_sequences) {
  check_vocabulary(model, task);
  const std::pair<const char*, int64_t> answers[] = {{"same", kSame}, {"moved", kMoved}};
  ErrorCount errors[std::size(answers)];
  for_test_batches(task, "products", num_sequences > 0 ? num_sequences : 200, [&](const Batch& batch) {
    const at::Tensor wrong_BT = likeliest_tokens(model, batch.tokens).ne(batch.targets);
    for (size_t i = 0; i < std::size(answers); ++i) {
      const at::Tensor counted_BT = batch.targets.eq(answers[i].second);
      errors[i].wrong += wrong_BT.logical_and(counted_BT).sum().item<int64_t>();
      errors[i].counted += counted_BT.sum().item<int64_t>();
    }
  });
  json accuracy, products;
  for (size_t i = 0; i < std::size(answers); ++i) {
    accuracy[answers[i].first] = 100 - percent_of(errors[i], fmt::format("product that is \"{}\"", answers[i].first));
    products[answers[i].first] = errors[i].counted;
  }
  return {{"accuracy", accuracy}, {"products", products}};
}

json evaluate_task(const LanguageModel& model, Recipe& recipe, int64_t tokens_per_row, int64_t num_sequences) {
  const std::string kind = read_data_kind(recipe);
  json result = {{"task", kind}};
  if (kind == "flip_flop") {
    result.update(evaluate_flip_flop(model, FlipFlop::read(recipe, tokens_per_row), read_test_reads(recipe), num_sequences));
  } else if (kind == "word_problem") {
    const WordProblem problem = WordProblem::read(recipe, tokens_per_row);
    result.update({{"group", problem.identity().at("group")}, {"prefix", problem.prefix()}});
    result.update(evaluate_word_problem(model, problem, num_sequences));
  } else if (kind == "mqrar") {
    const Mqrar task = Mqrar::read(recipe, tokens_per_row);
    result["n_back"] = task.identity().at("n_back");
    result.update(evaluate_mqrar(model, task, num_sequences));
  } else if (kind == "swap_identity") {
    result.update(evaluate_swap_identity(model, SwapIdentity(tokens_per_row), num_sequences));
  } else {
    fail("{}: \"{}\" is no synthetic task", recipe.name(), kind);
  }
  return result;
}

}  // namespace pathattn
