// The explicit models make no mistake, however long the sequence, through the same kernels and files as any other model.
#include "construct/explicit_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "base/error_of.h"
#include "base/scratch_folder.h"
#include "data/flip_flop.h"
#include "data/swap_identity.h"
#include "model/checkpoint.h"

namespace pathattn {
namespace {

class ExplicitModel : public testing::TestWithParam<at::ScalarType> {
 protected:
  // Smallest lead of the right token's logit over every other one, over all counted targets.
  static double smallest_lead(const std::string& name, const Batch& batch) {
    const at::NoGradGuard no_grad;
    const LanguageModel model = explicit_model(name, GetParam());
    const at::Tensor counted_BT = batch.targets.ne(kIgnoreTarget);
    const at::Tensor logits_NV = model.logits(model.hidden(batch.tokens).index({counted_BT}));
    const at::Tensor targets_N1 = batch.targets.index({counted_BT}).unsqueeze(1);
    const at::Tensor right_N1 = logits_NV.gather(1, targets_N1);
    return (right_N1 - logits_NV.scatter(1, targets_N1, -1e9)).min().item<double>();
  }
};

TEST_P(ExplicitModel, theorem_2_1_identity_of_products_of_swaps) {
  const LanguageModel model = explicit_model("swap_identity");
  EXPECT_EQ(model.config().num_layers, 1);
  EXPECT_EQ(model.config().num_heads, 2);
  EXPECT_GT(smallest_lead("swap_identity", SwapIdentity(300).sequences(0, kTest, 0, 100)), 0.5);
}

TEST_P(ExplicitModel, theorem_2_1_over_32768_tokens) {
  EXPECT_GT(smallest_lead("swap_identity", SwapIdentity(32768).sequences(0, kTest, 0, 1)), 0.5);
}

TEST_P(ExplicitModel, flip_flop_of_every_density) {
  for (const FlipFlopTestSet& set : kFlipFlopTestSets)
    EXPECT_GT(smallest_lead("flip_flop", FlipFlop(set.p_ignore, 512).sequences(0, kTest, 0, 20)), 0.5) << set.name;
}

TEST_P(ExplicitModel, flip_flop_over_32768_tokens) { EXPECT_GT(smallest_lead("flip_flop", FlipFlop(0.98, 32768).sequences(0, kTest, 0, 1)), 0.5); }

INSTANTIATE_TEST_SUITE_P(, ExplicitModel, testing::Values(at::kFloat, at::kBFloat16), [](const auto& info) { return c10::toString(info.param); });

TEST(ExplicitModels, are_ordinary_checkpoints_without_the_convolution) {
  const ScratchFolder folder;
  for (const std::string& name : explicit_model_names()) {
    const LanguageModel model = explicit_model(name);
    save_model(model, folder.path() / name);
    const LanguageModel loaded = load_model(folder.path() / name);
    EXPECT_TRUE(loaded.config() == model.config());
    EXPECT_FALSE(loaded.config().w_conv);
    for (size_t i = 0; i < model.named_parameters().size(); ++i)
      EXPECT_TRUE(loaded.named_parameters()[i].second.equal(model.named_parameters()[i].second)) << model.named_parameters()[i].first;
  }
  EXPECT_NE(error_of([] { explicit_model("parity"); }).find("flip_flop and swap_identity"), std::string::npos);
}

}  // namespace
}  // namespace pathattn
