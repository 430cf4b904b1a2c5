#include "model/config.h"

#include <initializer_list>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pathattn {
namespace {

using nlohmann::json;

constexpr std::pair<AttentionKind, const char*> kKindNames[] = {{AttentionKind::kPath, "path"}, {AttentionKind::kPathFox, "path_fox"},
                                                                {AttentionKind::kFox, "fox"},   {AttentionKind::kSba, "sba"},
                                                                {AttentionKind::kRope, "rope"}, {AttentionKind::kNope, "nope"}};
constexpr int64_t kMaxSize = int64_t{1} << 24;  // of any one count, so that products of two fit
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxConvSize = 64;
constexpr double kMaxNormEps = 1;
constexpr double kMaxRopeTheta = 1e12;

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  for (const auto& [kind, name] : kKindNames) names.push_back(name);
  return names;
}

// The fields of one config.json. A field that is null counts as absent, as in the public packages.
class Fields {
 public:
  Fields(const json& values, std::string where) : values_(values), where_(std::move(where)) {
    if (!values.is_object()) fail("{}: the configuration must be a JSON object, it is {}", where_, values.type_name());
  }

  const std::string& where() const { return where_; }
  bool has(const std::string& key) const { return values_.contains(key) && !values_[key].is_null(); }

  int64_t integer(const std::string& key, std::optional<int64_t> fallback, int64_t low, int64_t high = kMaxSize) const {
    if (!has(key)) return fallback ? *fallback : missing<int64_t>(key);
    const json& value = values_[key];
    if (!value.is_number_integer() || value < low || value > high)
      fail("{}: {} is {}, it must be an integer in {} ... {}", where_, key, value.dump(), low, high);
    return value.get<int64_t>();
  }

  double positive(const std::string& key, double fallback, double high) const {
    if (!has(key)) return fallback;
    const json& value = values_[key];
    if (!value.is_number() || !(value.get<double>() > 0) || value.get<double>() > high)
      fail("{}: {} is {}, it must be a positive number, at most {:g}", where_, key, value.dump(), high);
    return value.get<double>();
  }

  bool boolean(const std::string& key, std::optional<bool> fallback) const {
    if (!has(key)) return fallback ? *fallback : missing<bool>(key);
    if (!values_[key].is_boolean()) fail("{}: {} is {}, it must be true or false", where_, key, values_[key].dump());
    return values_[key].get<bool>();
  }

  std::string string(const std::string& key) const {
    if (!has(key)) return missing<std::string>(key);
    if (!values_[key].is_string()) fail("{}: {} is {}, it must be a string", where_, key, values_[key].dump());
    return values_[key].get<std::string>();
  }

  // Refuses an option whose other settings we do not have.
  void only(const std::string& key, std::initializer_list<json> allowed) const {
    if (!has(key)) return;
    for (const json& value : allowed)
      if (values_[key] == value) return;
    const std::string alternative = allowed.size() == 0 ? "null" : allowed.begin()->dump();
    fail("{}: {} = {} is not supported, only {} is", where_, key, values_[key].dump(), alternative);
  }

  const json& object(const std::string& key) const {
    if (!values_[key].is_object()) fail("{}: {} is {}, it must be an object", where_, key, values_[key].dump());
    return values_[key];
  }

 private:
  template <typename T>
  T missing(const std::string& key) const {
    fail("{}: the field {} is missing", where_, key);
  }
  const json& values_;
  std::string where_;
};

void read_common(const Fields& fields, const char* heads, const char* kv_heads, const char* eps, ModelConfig& config) {
  config.vocabulary_size = fields.integer("vocab_size", {}, 1);
  config.hidden_size = fields.integer("hidden_size", {}, 1);
  config.num_layers = fields.integer("num_hidden_layers", {}, 1, kMaxLayers);
  config.num_heads = fields.integer(heads, {}, 1);
  config.num_kv_heads = fields.integer(kv_heads, config.num_heads, 1);
  config.norm_eps = fields.positive(eps, 1e-6, kMaxNormEps);
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings", false);
  if (fields.has("bos_token_id")) config.bos_token_id = fields.integer("bos_token_id", {}, 0);
  if (fields.has("eos_token_id")) config.eos_token_id = fields.integer("eos_token_id", {}, 0);
  fields.only("hidden_act", {"silu", "swish"});
  fields.only("quantization_config", {});
  fields.only("rope_scaling", {});
  fields.only("attention_bias", {false});
  fields.only("mlp_bias", {false});
  fields.only("head_dim", {config.hidden_size / config.num_heads});
}

// What the public package's two models have in common.
void read_public_package(const Fields& fields, ModelConfig& config) {
  read_common(fields, "num_heads", "num_kv_heads", "norm_eps", config);
  const int64_t ratio = fields.integer("hidden_ratio", 4, 1, 1024);
  config.intermediate_size = fields.integer("intermediate_size", default_intermediate_size(config.hidden_size, ratio), 1);
  fields.only("elementwise_affine", {true});
  fields.only("attnres_block_size", {});
  fields.only("window_size", {});
}

void read_path_options(const Fields& fields, ModelConfig& config) {
  config.qk_norm = fields.boolean("use_qk_norm", false);
  config.low_rank_w = fields.boolean("use_low_rank_w", true);
  config.w_conv = fields.boolean("use_w_shortconv", true);
  config.conv_size = fields.integer("conv_size", 3, 1, kMaxConvSize);
  config.conv_bias = fields.boolean("conv_bias", false);
}

void read_path(const Fields& fields, ModelConfig& config) {
  read_public_package(fields, config);
  read_path_options(fields, config);
  config.kind = fields.boolean("use_forget_gate", false) ? AttentionKind::kPathFox : AttentionKind::kPath;
  const bool gate_scaled = fields.boolean("gate_scaled", true);
  config.gate_scaled = gate_scaled && config.has_gate();
}

void read_fox(const Fields& fields, ModelConfig& config) {
  read_public_package(fields, config);
  config.kind = AttentionKind::kFox;
  config.qk_norm = fields.boolean("qk_norm", false);
  config.qkv_bias = fields.boolean("qkv_bias", false);
  config.output_gate = fields.boolean("use_output_gate", false);
  fields.only("gate_scaled", {false});
}

void read_llama(const Fields& fields, ModelConfig& config) {
  read_common(fields, "num_attention_heads", "num_key_value_heads", "rms_norm_eps", config);
  config.kind = AttentionKind::kRope;
  config.intermediate_size = fields.integer("intermediate_size", {}, 1);
  config.rope_theta = fields.positive("rope_theta", 10000, kMaxRopeTheta);
  if (fields.has("rope_parameters")) {
    const Fields rope(fields.object("rope_parameters"), fields.where() + ": rope_parameters");
    rope.only("rope_type", {"default"});
    rope.only("partial_rotary_factor", {1.0});
    config.rope_theta = rope.positive("rope_theta", config.rope_theta, kMaxRopeTheta);
  }
  fields.only("pretraining_tp", {1});
}

// Models that no public package computes.
void read_own(const Fields& fields, ModelConfig& config) {
  const std::string attention = fields.string("attention");
  read_public_package(fields, config);
  if (attention == "nope" || attention == "sba") {
    config.kind = attention_kind(attention);
  } else if (attention == "path" || attention == "path_fox") {
    read_path_options(fields, config);
    config.kind = attention_kind(attention);
    if (config.has_gate()) config.gate_scaled = fields.boolean("gate_scaled", {});
  } else {
    fail("{}: attention is \"{}\", a model of type pathattn has \"path\", \"path_fox\", \"sba\" or \"nope\"", fields.where(), attention);
  }
}

bool is_public_path(const ModelConfig& config) {
  const bool options_of_its_models = !config.qk_norm && config.conv_size == 3 && !config.conv_bias;
  return config.has_w() && options_of_its_models && (!config.has_gate() || config.gate_scaled);
}

}  // namespace

const char* name_of(AttentionKind kind) {
  for (const auto& [candidate, name] : kKindNames)
    if (candidate == kind) return name;
  fail("attention kind {} does not exist", static_cast<int>(kind));
}

AttentionKind attention_kind(const std::string& name) {
  for (const auto& [kind, candidate] : kKindNames)
    if (name == candidate) return kind;
  fail("\"{}\" is no kind of attention, there are path, path_fox, fox, sba, rope and nope", name);
}

int64_t default_intermediate_size(int64_t hidden_size, int64_t hidden_ratio) {
  const int64_t size = hidden_size * hidden_ratio * 2 / 3;
  return (size + 255) / 256 * 256;
}

void ModelConfig::check(const std::string& where) const {
  if (hidden_size % num_heads != 0) fail("{}: hidden_size {} is not a multiple of the {} heads", where, hidden_size, num_heads);
  if (num_heads % num_kv_heads != 0) fail("{}: {} heads are not a multiple of the {} key/value heads", where, num_heads, num_kv_heads);
  if (head_dim() > kMaxHeadDim)
    fail("{}: hidden_size {} with {} heads makes heads of width {}, at most {} is supported", where, hidden_size, num_heads, head_dim(), kMaxHeadDim);
  if (kind == AttentionKind::kRope && head_dim() % 2 != 0) fail("{}: rotary positions need heads of even width, they have {}", where, head_dim());
  if (conv_bias && !w_conv) fail("{}: a convolution bias without the convolution", where);
  for (const auto& token : {bos_token_id, eos_token_id})
    if (token && *token >= vocabulary_size) fail("{}: the bos or eos token {} is outside the vocabulary of {}", where, *token, vocabulary_size);
}

ModelConfig ModelConfig::from_json(const json& values, const std::string& where) {
  const Fields fields(values, where);
  const std::string type = fields.string("model_type");
  ModelConfig config;
  if (type == "path_attn")
    read_path(fields, config);
  else if (type == "forgetting_transformer")
    read_fox(fields, config);
  else if (type == "llama")
    read_llama(fields, config);
  else if (type == "pathattn")
    read_own(fields, config);
  else
    fail("{}: model_type \"{}\" is unknown, supported are path_attn, forgetting_transformer, llama and pathattn", where, type);
  config.check(where);
  return config;
}

json ModelConfig::to_json() const {
  json values = {{"vocab_size", vocabulary_size},
                 {"hidden_size", hidden_size},
                 {"num_hidden_layers", num_layers},
                 {"intermediate_size", intermediate_size},
                 {"tie_word_embeddings", tie_word_embeddings},
                 {"dtype", "float32"}};
  if (bos_token_id) values["bos_token_id"] = *bos_token_id;
  if (eos_token_id) values["eos_token_id"] = *eos_token_id;
  if (kind == AttentionKind::kRope) {
    values.update({{"model_type", "llama"},
                   {"architectures", {"LlamaForCausalLM"}},
                   {"num_attention_heads", num_heads},
                   {"num_key_value_heads", num_kv_heads},
                   {"head_dim", head_dim()},
                   {"rms_norm_eps", norm_eps},
                   {"rope_theta", rope_theta},
                   {"hidden_act", "silu"},
                   {"attention_bias", false},
                   {"mlp_bias", false}});
    return values;
  }
  values.update({{"num_heads", num_heads}, {"num_kv_heads", num_kv_heads}, {"norm_eps", norm_eps}, {"hidden_act", "swish"}});
  if (kind == AttentionKind::kFox) {
    values.update({{"model_type", "forgetting_transformer"},
                   {"architectures", {"ForgettingTransformerForCausalLM"}},
                   {"qk_norm", qk_norm},
                   {"qkv_bias", qkv_bias},
                   {"use_output_gate", output_gate}});
    return values;
  }
  if (is_public_path(*this)) {
    values.update({{"model_type", "path_attn"}, {"architectures", {"PaTHAttentionForCausalLM"}}, {"use_forget_gate", has_gate()}});
  } else {
    values.update({{"model_type", "pathattn"}, {"attention", name_of(kind)}});
  }
  if (has_w()) {
    values.update(
        {{"use_low_rank_w", low_rank_w}, {"use_w_shortconv", w_conv}, {"conv_size", conv_size}, {"conv_bias", conv_bias}, {"use_qk_norm", qk_norm}});
  }
  if (kind == AttentionKind::kPathFox) values["gate_scaled"] = gate_scaled;
  return values;
}

ModelConfig model_config_from_recipe(Recipe& recipe, int64_t vocabulary_size) {
  ModelConfig config;
  config.kind = attention_kind(recipe.choice("model.kind", "path", kind_names()));
  config.vocabulary_size = vocabulary_size;
  config.hidden_size = recipe.integer("model.hidden_size", 128, 1, kMaxSize);
  config.num_layers = recipe.integer("model.num_layers", 2, 1, kMaxLayers);
  config.num_heads = recipe.integer("model.num_heads", 4, 1, kMaxSize);
  config.num_kv_heads = recipe.integer("model.num_kv_heads", 0, 0, kMaxSize);
  if (config.num_kv_heads == 0) config.num_kv_heads = config.num_heads;
  config.intermediate_size = recipe.integer("model.intermediate_size", 0, 0, kMaxSize);
  if (config.intermediate_size == 0) config.intermediate_size = default_intermediate_size(config.hidden_size);
  config.norm_eps = recipe.number("model.norm_eps", 1e-6, 1e-12, kMaxNormEps);
  config.tie_word_embeddings = recipe.boolean("model.tie_word_embeddings", false);
  if (config.has_w()) {
    config.low_rank_w = recipe.boolean("model.low_rank_w", true);
    config.w_conv = recipe.boolean("model.w_conv", true);
    config.conv_size = recipe.integer("model.conv_size", 3, 1, kMaxConvSize);
    config.conv_bias = recipe.boolean("model.conv_bias", false);
  }
  if (config.has_w() || config.has_gate()) config.qk_norm = recipe.boolean("model.qk_norm", false);
  if (config.kind == AttentionKind::kPathFox) config.gate_scaled = recipe.boolean("model.gate_scaled", false);
  if (config.kind == AttentionKind::kFox) {
    config.qkv_bias = recipe.boolean("model.qkv_bias", false);
    config.output_gate = recipe.boolean("model.output_gate", false);
  }
  if (config.kind == AttentionKind::kRope) config.rope_theta = recipe.number("model.rope_theta", 10000, 1, kMaxRopeTheta);
  config.check(recipe.name() + ": [model]");
  return config;
}

}  // namespace pathattn
