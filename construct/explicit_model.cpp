#include "construct/explicit_model.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include <fmt/ranges.h>

#include "base/error.h"
#include "data/flip_flop.h"
#include "data/swap_identity.h"
#include "model/parameters.h"

namespace pathattn {
namespace {

constexpr int64_t kHiddenSize = 16;
constexpr double kNormedOne = 4;  // what the norm makes of a single 1 among kHiddenSize channels
constexpr double kSharp = 60;     // logit of a product of 1: e^60 outweighs any number of keys without a match
constexpr double kLongW = 1000;   // before w is normalised: the norm's epsilon of 1e-6 vanishes beside it

// Zeros everywhere but in the norms. Channel t of the embedding is 1 for token t; the channels above are there to write into.
class Weights {
 public:
  explicit Weights(const ModelConfig& config) : config_(config) {
    for (const ParameterEntry& entry : parameter_table(config)) {
      parameters_.emplace(entry.name, entry.start == Start::kOnes ? at::full(entry.shape, 1.0) : at::zeros(entry.shape));
    }
  }

  void set(const std::string& name, int64_t out, int64_t in, double value) { parameters_.at(name)[out][in] = value; }
  void set_attention(int64_t layer, const std::string& projection, int64_t out, int64_t in, double value) {
    set(layer_names(config_, layer).attention + projection + ".weight", out, in, value);
  }
  // Query coordinate for products of `size`, the same for every token of the first num_tokens.
  void ask(int64_t layer, int64_t coordinate, int64_t num_tokens, double size) {
    const double scale = 1 / std::sqrt(static_cast<double>(config_.head_dim()));
    for (int64_t token = 0; token < num_tokens; ++token) set_attention(layer, "q_proj", coordinate, token, size * kSharp / scale / kNormedOne);
  }
  void fill_bias_of_beta(int64_t layer, double value) { parameters_.at(layer_names(config_, layer).attention + "bt_proj.bias").fill_(value); }

  LanguageModel model(at::ScalarType compute_type) { return LanguageModel(config_, std::move(parameters_), compute_type); }

 private:
  ModelConfig config_;
  std::map<std::string, at::Tensor> parameters_;
};

ModelConfig path_config(int64_t vocabulary_size, int64_t num_layers, int64_t num_heads) {
  ModelConfig config;
  config.kind = AttentionKind::kPath;
  config.vocabulary_size = vocabulary_size;
  config.hidden_size = kHiddenSize;
  config.num_layers = num_layers;
  config.num_heads = config.num_kv_heads = num_heads;
  config.intermediate_size = 1;
  config.low_rank_w = config.w_conv = false;
  return config;
}

LanguageModel swap_identity(at::ScalarType compute_type) {
  constexpr int64_t kHeads = 2, kSwapCoordinate = kNumPlaces, kNumInputs = kMoved;
  constexpr double kThreshold = 1.5, kSaturated = 40;  // sigmoid(40) is 1 in float32: beta is 2
  Weights weights(path_config(kNumSwapTokens, 1, kHeads));
  weights.fill_bias_of_beta(0, kSaturated);
  for (int64_t token = 0; token < kNumInputs; ++token) {
    weights.set("model.embeddings.weight", token, token, 1);
    weights.set("lm_head.weight", kMoved, token, kThreshold);
  }
  for (int64_t head = 0; head < kHeads; ++head) {
    const int64_t first = head * kHiddenSize / kHeads, seen = kNumInputs + head;  // the head's first coordinate; the channel of "kBegin is seen"
    for (const auto& [place, mark] : {std::pair{2 * head, -1.0}, std::pair{2 * head + 1, 1.0}}) {
      weights.ask(0, first + place, kNumInputs, mark);
      weights.set_attention(0, "k_proj", first + place, kBegin, mark / kNormedOne);
    }
    weights.ask(0, first + kSwapCoordinate, kNumInputs, kThreshold);
    for (size_t swap = 0; swap < kSwaps.size(); ++swap) {
      const int64_t token = kFirstSwap + static_cast<int64_t>(swap);
      weights.set_attention(0, "k_proj", first + kSwapCoordinate, token, 1 / kNormedOne);
      weights.set_attention(0, "w_proj", first + kSwaps[swap].first, token, kLongW);
      weights.set_attention(0, "w_proj", first + kSwaps[swap].second, token, -kLongW);
    }
    weights.set_attention(0, "v_proj", first, kBegin, 1 / kNormedOne);
    weights.set_attention(0, "o_proj", seen, first, 1);
    weights.set("lm_head.weight", kSame, seen, 1);
  }
  return weights.model(compute_type);
}

LanguageModel flip_flop(at::ScalarType compute_type) {
  enum Channel : int64_t { kFlag = kNumFlipFlopTokens, kAnswerZero, kAnswerOne };  // kFlag: the last instruction is a write
  Weights weights(path_config(kNumFlipFlopTokens, 2, 1));                          // beta starts at 1
  for (int64_t token = 0; token < kNumFlipFlopTokens; ++token) weights.set("model.embeddings.weight", token, token, 1);
  for (int64_t layer : {0, 1}) weights.ask(layer, 0, kNumFlipFlopTokens, 1);

  const auto set_key = [&](int64_t layer, int64_t channel) {  // the key's first coordinate, and w along it
    weights.set_attention(layer, "k_proj", 0, channel, 1 / kNormedOne);
    weights.set_attention(layer, "w_proj", 0, channel, kLongW);
  };
  for (const int64_t instruction : {kWrite, kRead, kIgnore}) set_key(0, instruction);
  weights.set_attention(0, "v_proj", 0, kWrite, 1 / kNormedOne);
  weights.set_attention(0, "o_proj", kFlag, 0, 1);

  set_key(1, kFlag);
  for (const auto& [coordinate, bit, answer] : {std::tuple{0, kZero, kAnswerZero}, std::tuple{1, kOne, kAnswerOne}}) {
    weights.set_attention(1, "v_proj", coordinate, bit, 1 / kNormedOne);
    weights.set_attention(1, "o_proj", answer, coordinate, 1);
    weights.set("lm_head.weight", bit, answer, 1);
  }
  return weights.model(compute_type);
}

}  // namespace

const std::vector<std::string>& explicit_model_names() {
  static const std::vector<std::string> names = {"flip_flop", "swap_identity"};
  return names;
}

LanguageModel explicit_model(const std::string& name, at::ScalarType compute_type) {
  if (name == "flip_flop") return flip_flop(compute_type);
  if (name == "swap_identity") return swap_identity(compute_type);
  fail("there is no explicit model {}, there are {}", name, fmt::join(explicit_model_names(), " and "));
}

}  // namespace pathattn
