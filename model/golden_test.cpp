// Checkpoints and a layer of a public implementation, with the logits and gradients it gives (tests/golden/README.md).
#include <gtest/gtest.h>

#include "base/scratch_folder.h"
#include "model/checkpoint.h"
#include "model/parameters.h"
#include "model/rotary.h"
#include "model/tensor_file.h"
#include "model/test_models.h"

namespace pathattn {
namespace {

constexpr double kFloatBound = 1e-5, kDoubleBound = 1e-7;

class GoldenModel : public testing::TestWithParam<const char*> {
 protected:
  std::filesystem::path directory() const { return kGolden / GetParam(); }
  at::Tensor recorded(const std::string& name) const { return load_tensors(directory() / "io.safetensors").at(name); }
};

TEST_P(GoldenModel, logits_and_loss_in_float64) {
  torch::NoGradGuard no_gradients;
  const LanguageModel model = load_model(directory(), at::kDouble);
  const at::Tensor tokens = recorded("input_ids"), logits = model.forward(tokens);
  EXPECT_LT(relative_error(logits, recorded("logits")), kDoubleBound);
  EXPECT_NEAR(next_token_loss(logits, tokens).item<double>(), recorded("loss").item<double>(), 1e-12);
}

TEST_P(GoldenModel, logits_in_float32_packed_or_not) {
  torch::NoGradGuard no_gradients;
  const LanguageModel model = load_model(directory());
  const at::Tensor tokens = recorded("input_ids"), logits = recorded("logits");
  EXPECT_LT(relative_error(model.forward(tokens), logits), kFloatBound);
  const at::Tensor packed = model.forward(tokens.view({1, 150}), torch::tensor({0, 75, 150}));
  EXPECT_LT(relative_error(packed.view({2, 75, 97}), logits), kFloatBound);
}

TEST_P(GoldenModel, logits_in_bfloat16) {
  torch::NoGradGuard no_gradients;
  EXPECT_LT(relative_error(load_model(directory(), at::kBFloat16).forward(recorded("input_ids")), recorded("logits")), 3e-2);
}

TEST_P(GoldenModel, prefill_then_one_token_steps) {
  const LanguageModel model = load_model(directory());
  const at::Tensor tokens = recorded("input_ids");
  for (const int64_t split : {1, 40}) {
    LanguageState state = model.empty_state(2, 75);
    std::vector<at::Tensor> hidden = {model.prefill(tokens.narrow(1, 0, split), std::nullopt, state)};
    for (int64_t t = split; t < 75; ++t) hidden.push_back(model.step(tokens.narrow(1, t, 1), state));
    EXPECT_LT(relative_error(model.logits(torch::cat(hidden, 1)), recorded("logits")), kFloatBound) << split;
  }
}

TEST_P(GoldenModel, every_split_point) {
  const LanguageModel model = load_model(directory());
  const at::Tensor tokens = recorded("input_ids"), logits = recorded("logits");
  for (int64_t split = 1; split < 75; ++split) {
    LanguageState state = model.empty_state(2, 75);
    const at::Tensor first = model.prefill(tokens.narrow(1, 0, split), std::nullopt, state),
                     rest = model.step(tokens.narrow(1, split, 75 - split), state);
    EXPECT_LT(relative_error(model.logits(torch::cat({first, rest}, 1)), logits), kFloatBound) << split;
  }
}

TEST_P(GoldenModel, saved_names_shapes_and_format_are_those_of_the_checkpoint) {
  const LanguageModel model = load_model(directory());
  const ScratchFolder folder;
  save_model(model, folder.path());
  const SafetensorsFile ours(folder / "model.safetensors"), theirs(directory() / "model.safetensors");
  EXPECT_EQ(ours.metadata(), theirs.metadata());
  ASSERT_EQ(ours.entries().size(), theirs.entries().size());
  for (const auto& [name, entry] : theirs.entries()) {
    EXPECT_EQ(ours.at(name).shape, entry.shape) << name;
    EXPECT_EQ(ours.at(name).dtype, "F32") << name;
    EXPECT_TRUE(torch::equal(to_tensor(ours.at(name), name), to_tensor(entry, name).to(torch::kFloat))) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenModel, testing::Values("model_path", "model_path_gate", "model_path_gqa_fullw_qknorm", "model_fox"));

LanguageModel with_config(const std::filesystem::path& directory, const ModelConfig& config) {
  std::map<std::string, at::Tensor> parameters = load_tensors(directory / "model.safetensors"), kept;
  for (const ParameterEntry& entry : parameter_table(config)) kept.emplace(entry.name, parameters.at(entry.name).to(torch::kDouble));
  return LanguageModel(config, kept, at::kDouble);
}

TEST(Golden, the_other_gate_convention_moves_the_logits) {
  torch::NoGradGuard no_gradients;
  const auto io = load_tensors(kGolden / "model_path_gate" / "io.safetensors");
  ModelConfig config = load_config(kGolden / "model_path_gate");
  EXPECT_TRUE(config.gate_scaled);
  config.gate_scaled = false;
  EXPECT_GT(relative_error(with_config(kGolden / "model_path_gate", config).forward(io.at("input_ids")), io.at("logits")), 0.3);
}

TEST(Golden, without_its_qk_norm_the_model_gives_what_the_public_loader_gives) {
  torch::NoGradGuard no_gradients;
  const auto directory = kGolden / "model_path_gqa_fullw_qknorm";
  const auto io = load_tensors(directory / "io.safetensors");
  ModelConfig config = load_config(directory);
  EXPECT_TRUE(config.qk_norm);
  config.qk_norm = false;
  EXPECT_LT(relative_error(with_config(directory, config).forward(io.at("input_ids")), io.at("logits_qk_norm_ignored")), kDoubleBound);
}

TEST(Golden, layer_with_all_options_and_its_gradients) {
  const auto file = load_tensors(kGolden / "layer_path_all_options.safetensors");
  ModelConfig config = small_config(AttentionKind::kPathFox);
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.conv_size = 4;
  config.conv_bias = config.qk_norm = config.gate_scaled = true;
  std::map<std::string, at::Tensor> weights;
  for (const auto& [name, tensor] : file)
    if (name.starts_with("weight.")) weights.emplace(name, tensor.to(torch::kDouble).set_requires_grad(true));
  const at::Tensor x = file.at("x").to(torch::kDouble).set_requires_grad(true);
  Call call;
  call.compute_type = at::kDouble;
  const at::Tensor y = AttentionLayer(config, weights, "weight.").forward(x, call, nullptr);
  EXPECT_LT(relative_error(y, file.at("y")), 1e-12);
  y.backward(file.at("dy").to(torch::kDouble));
  EXPECT_LT(relative_error(x.grad(), file.at("dx")), 1e-12);
  for (const auto& [name, weight] : weights) EXPECT_LT(relative_error(weight.grad(), file.at("d" + name)), kDoubleBound) << name;
}

TEST(Golden, rotary_positions) {
  const auto file = load_tensors(kGolden / "op_rope.safetensors");
  const int64_t tokens = file.at("q").size(1), head_dim = file.at("q").size(3);
  const auto [cosine, sine] = rotation_at(torch::arange(tokens).unsqueeze(0), head_dim, 10000, at::kDouble);
  EXPECT_LT(relative_error(rotate(file.at("q").to(torch::kDouble), cosine, sine), file.at("q_rope")), 1e-12);
  EXPECT_LT(relative_error(rotate(file.at("k").to(torch::kDouble), cosine, sine), file.at("k_rope")), 1e-12);
}

}  // namespace
}  // namespace pathattn
