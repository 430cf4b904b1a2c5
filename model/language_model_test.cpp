#include "model/language_model.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adamw.h>

#include "base/error.h"
#include "model/rotary.h"
#include "model/row_norm.h"
#include "model/test_models.h"

namespace pathattn {
namespace {

TEST(LanguageModel, prefill_and_steps_equal_forward_for_every_kind) {
  const at::Tensor tokens = random_tokens(2, 40, 50);
  for (const ModelConfig& config : small_configs()) {
    const LanguageModel model = random_model(config, 1, at::kDouble);
    const at::Tensor whole = model.hidden(tokens).detach();
    for (const int64_t split : {1, 2, 3, 17, 39}) {
      LanguageState state = model.empty_state(2, 40);
      std::vector<at::Tensor> parts = {model.prefill(tokens.narrow(1, 0, split), std::nullopt, state)};
      if (split < 38) parts.push_back(model.step(tokens.narrow(1, split, 2), state));
      for (int64_t t = split < 38 ? split + 2 : split; t < 40; ++t) parts.push_back(model.step(tokens.narrow(1, t, 1), state));
      EXPECT_LT(relative_error(torch::cat(parts, 1), whole), 1e-12) << describe(config) << " split at " << split;
    }
  }
}

TEST(LanguageModel, packed_documents_do_not_see_each_other) {
  torch::NoGradGuard no_gradients;
  const at::Tensor tokens = random_tokens(1, 90, 50), cu_seqlens = torch::tensor({0, 0, 1, 3, 3, 40, 90});
  for (const ModelConfig& config : small_configs()) {
    const LanguageModel model = random_model(config, 1, at::kDouble);
    const at::Tensor packed = model.hidden(tokens, cu_seqlens);
    for (int64_t n = 0; n < 6; ++n) {
      const int64_t start = cu_seqlens[n].item<int64_t>(), length = cu_seqlens[n + 1].item<int64_t>() - start;
      if (length == 0) continue;
      EXPECT_LT(relative_error(packed.narrow(1, start, length), model.hidden(tokens.narrow(1, start, length))), 1e-12) << describe(config) << n;
    }
  }
}

TEST(LanguageModel, P20_a_ragged_batch_is_the_token_weighted_mean_of_its_rows) {
  for (const auto kind : {AttentionKind::kPathFox, AttentionKind::kRope}) {
    const LanguageModel packed = random_model(small_config(kind)), alone = random_model(small_config(kind));
    const at::Tensor tokens = random_tokens(1, 264, 50), ends = torch::tensor({0, 7, 71, 136, 264});
    std::vector<at::Tensor> losses, logits, targets;
    const at::Tensor packed_logits = packed.forward(tokens, ends);
    for (int64_t n = 0; n < 4; ++n) {
      const int64_t start = ends[n].item<int64_t>(), length = ends[n + 1].item<int64_t>() - start;
      const at::Tensor row = tokens.narrow(1, start, length);
      losses.push_back(next_token_loss(alone.forward(row), row) * (length - 1));
      logits.push_back(packed_logits[0].narrow(0, start, length - 1));
      targets.push_back(row[0].narrow(0, 1, length - 1));
    }
    const at::Tensor packed_loss = torch::cross_entropy_loss(torch::cat(logits), torch::cat(targets)), loss = torch::stack(losses).sum() / 260;
    EXPECT_NEAR(packed_loss.item<double>() / loss.item<double>(), 1, 1e-5);
    packed_loss.backward();
    loss.backward();
    for (size_t i = 0; i < packed.named_parameters().size(); ++i)
      EXPECT_LT(relative_error(packed.named_parameters()[i].second.grad(), alone.named_parameters()[i].second.grad()), 1e-4)
          << packed.named_parameters()[i].first;
  }
}

TEST(LanguageModel, P21_qk_norm_acts_in_training_prefill_and_decoding) {
  ModelConfig config = small_config(AttentionKind::kPath);
  config.qk_norm = true;
  const LanguageModel model = random_model(config);
  const at::Tensor tokens = random_tokens(1, 200, 50), whole = model.forward(tokens).detach();
  LanguageState all = model.empty_state(1, 200), half = model.empty_state(1, 200);
  EXPECT_LT(relative_error(model.logits(model.prefill(tokens, std::nullopt, all)).detach(), whole), 1e-5);
  std::vector<at::Tensor> parts = {model.prefill(tokens.narrow(1, 0, 100), std::nullopt, half)};
  for (int64_t t = 100; t < 200; ++t) parts.push_back(model.step(tokens.narrow(1, t, 1), half));
  EXPECT_LT(relative_error(model.logits(torch::cat(parts, 1)).detach(), whole), 1e-5);
}

TEST(LanguageModel, P28_rows_of_w_that_are_zero_get_no_gradient) {
  const ModelConfig config = small_config(AttentionKind::kPath);
  LanguageModel model = random_model(config);
  for (const auto& [name, tensor] : model.named_parameters())
    if (name.find("w_proj.1") != std::string::npos) tensor.data().zero_();
  LanguageModel nope(small_config(AttentionKind::kNope), 1);
  const std::map<std::string, at::Tensor> parameters(model.named_parameters().begin(), model.named_parameters().end());
  for (const auto& [name, tensor] : nope.named_parameters()) tensor.data().copy_(parameters.at(name));
  const at::Tensor tokens = random_tokens(2, 70, 50), logits = model.forward(tokens);
  EXPECT_LT(relative_error(logits, nope.forward(tokens)), 1e-5);
  next_token_loss(logits, tokens).backward();
  for (const auto& [name, tensor] : model.named_parameters()) {
    if (name.find("w_proj") != std::string::npos || name.find("w_conv1d") != std::string::npos) {
      EXPECT_EQ(tensor.grad().abs().max().item<double>(), 0) << name;
    }
  }

  const at::Tensor rows = torch::randn({5, 16}).index_fill_(0, torch::tensor({2}), 0).set_requires_grad(true);
  unit_norm(rows).backward(torch::randn({5, 16}));
  EXPECT_EQ(rows.grad()[2].abs().max().item<double>(), 0);
  EXPECT_GT(rows.grad()[1].abs().max().item<double>(), 0);
}

TEST(LanguageModel, P31_norm_weights_of_a_bfloat16_model_move_like_those_of_a_float32_model) {
  ModelConfig config = small_config(AttentionKind::kPath);
  config.qk_norm = true;
  const at::Tensor tokens = random_tokens(4, 32, 50);
  std::vector<at::Tensor> moves;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const LanguageModel model(config, 3, type);
    std::vector<at::Tensor> parameters, norms;
    for (const auto& [name, tensor] : model.named_parameters()) {
      parameters.push_back(tensor);
      if (name.find("norm") != std::string::npos) norms.push_back(tensor);
    }
    torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-4).weight_decay(0));
    for (int step = 0; step < 200; ++step) {
      optimizer.zero_grad();
      next_token_loss(model.forward(tokens), tokens).backward();
      optimizer.step();
    }
    for (at::Tensor& norm : norms) {
      EXPECT_EQ(norm.scalar_type(), at::kFloat);
      EXPECT_GT((norm - 1).abs().max().item<double>(), 1e-3);
      norm = norm.detach().flatten() - 1;
    }
    moves.push_back(torch::cat(norms));
  }
  EXPECT_LT(relative_error(moves[1], moves[0]), 0.1);
}

TEST(LanguageModel, row_norms_have_the_gradients_of_their_formulas) {
  const auto options = torch::TensorOptions(torch::kDouble).requires_grad(true);
  const at::Tensor x = torch::randn({3, 700, 2, 24}, options), shared = torch::randn({24}, options), per_head = torch::randn({2, 24}, options);
  const at::Tensor dy = torch::randn_like(x);
  for (const at::Tensor& weight : {shared, per_head}) {
    const auto expected = torch::autograd::grad({x * torch::rsqrt(x.square().mean(-1, true) + 1e-2) * weight}, {x, weight}, {dy});
    const auto ours = torch::autograd::grad({rms_norm(x, weight, 1e-2)}, {x, weight}, {dy});
    for (size_t i = 0; i < 2; ++i) EXPECT_LT(relative_error(ours[i], expected[i]), 1e-13);
  }
  const at::Tensor small = (x.detach() * 1e-3).set_requires_grad(true);
  const auto expected = torch::autograd::grad({small * torch::rsqrt(small.square().sum(-1, true) + 1e-6)}, {small}, {dy});
  EXPECT_LT(relative_error(torch::autograd::grad({unit_norm(small)}, {small}, {dy})[0], expected[0]), 1e-13);
}

// Softmax attention, with rotary positions or without, and stick-breaking attention.
TEST(LanguageModel, layers_without_w_and_gate_are_their_definitions) {
  torch::NoGradGuard no_gradients;
  constexpr int64_t kTokens = 11, kHeads = 4, kWidth = 8;
  const at::Tensor x = torch::randn({2, kTokens, 32}, torch::kDouble), mask = torch::ones({kTokens, kTokens}, torch::kBool).triu(1);
  for (const auto kind : {AttentionKind::kRope, AttentionKind::kNope, AttentionKind::kSba}) {
    std::map<std::string, at::Tensor> weights;
    for (const auto& [name, rows] : {std::pair{"q", 32}, std::pair{"k", 16}, std::pair{"v", 16}, std::pair{"o", 32}})
      weights[std::string(name) + "_proj.weight"] = torch::randn({rows, 32}, torch::kDouble) / 4;
    const auto heads = [&](const char* name, int64_t count) {
      return x.matmul(weights.at(name).t()).view({2, kTokens, count, kWidth}).repeat_interleave(kHeads / count, 2).transpose(1, 2);
    };
    at::Tensor q = heads("q_proj.weight", 4), k = heads("k_proj.weight", 2);
    const at::Tensor v = heads("v_proj.weight", 2);
    Call call;
    call.compute_type = at::kDouble;
    if (kind == AttentionKind::kRope) {
      const at::Tensor frequencies = torch::pow(100.0, -torch::arange(0, 4, torch::kDouble) / 4);
      const at::Tensor turns =
          torch::polar(torch::ones({kTokens, 4}, torch::kDouble), torch::arange(kTokens, torch::kDouble).unsqueeze(1) * frequencies);
      const auto turn = [&](const at::Tensor& heads_BHTD) {
        const at::Tensor turned = torch::complex(heads_BHTD.narrow(-1, 0, 4).contiguous(), heads_BHTD.narrow(-1, 4, 4).contiguous()) * turns;
        return torch::cat({torch::real(turned), torch::imag(turned)}, -1);
      };
      q = turn(q), k = turn(k);
      std::tie(call.rotation_cos, call.rotation_sin) = rotation_at(torch::arange(kTokens).unsqueeze(0), kWidth, 100, at::kDouble);
    }
    const at::Tensor scores = q.matmul(k.transpose(2, 3)) / std::sqrt(8.0);
    at::Tensor weights_of_keys = scores.masked_fill(mask, -INFINITY).softmax(-1);
    if (kind == AttentionKind::kSba) {
      for (int64_t i = 0; i < kTokens; ++i) {
        at::Tensor rest = torch::ones({2, kHeads}, torch::kDouble);
        for (int64_t j = kTokens - 1; j >= 0; --j) {
          const at::Tensor share = j < i ? scores.select(2, i).select(2, j).sigmoid() : torch::zeros({2, kHeads}, torch::kDouble);
          weights_of_keys.select(2, i).select(2, j).copy_(share * rest);
          rest = rest * (1 - share);
        }
      }
    }
    const at::Tensor expected = weights_of_keys.matmul(v).transpose(1, 2).reshape({2, kTokens, 32}).matmul(weights.at("o_proj.weight").t());
    EXPECT_LT(relative_error(AttentionLayer(small_config(kind), weights, "").forward(x, call, nullptr), expected), 1e-13) << name_of(kind);
  }
}

TEST(LanguageModel, the_same_seed_gives_the_same_parameters) {
  const LanguageModel one(small_config(AttentionKind::kPath), 5), same(small_config(AttentionKind::kPath), 5),
      other(small_config(AttentionKind::kPath), 6);
  EXPECT_TRUE(torch::equal(one.named_parameters()[0].second, same.named_parameters()[0].second));
  EXPECT_FALSE(torch::equal(one.named_parameters()[0].second, other.named_parameters()[0].second));
}

TEST(LanguageModel, refuses_what_does_not_fit_and_keeps_the_state) {
  const LanguageModel model = random_model(small_config(AttentionKind::kPath));
  at::Tensor tokens = random_tokens(2, 8, 50);
  tokens[1][3] = 50;
  EXPECT_EQ(error_of([&] { model.forward(tokens); }), "tokens: token 50 at position 3 of row 1 is outside the vocabulary of 50");
  tokens[1][3] = -1;
  EXPECT_EQ(error_of([&] { model.forward(tokens); }), "tokens: token -1 at position 3 of row 1 is outside the vocabulary of 50");
  tokens[1][3] = 0;
  EXPECT_NE(error_of([&] { model.forward(tokens, torch::tensor({0, 16})); }).find("one row"), std::string::npos);
  EXPECT_NE(error_of([&] { model.forward(tokens.narrow(0, 0, 1), torch::tensor({0, 5, 4, 8})); }).find("must not decrease"), std::string::npos);
  EXPECT_NE(error_of([&] {
              model.forward(tokens.narrow(0, 0, 1), torch::tensor({0, 5}));
            }).find("must end with the number of tokens 8"),
            std::string::npos);

  LanguageState state = model.empty_state(2, 10), untouched = model.empty_state(2, 10);
  model.prefill(tokens, std::nullopt, state);
  model.prefill(tokens, std::nullopt, untouched);
  EXPECT_NE(error_of([&] { model.step(tokens.narrow(1, 0, 3), state); }).find("3 more tokens after 8 do not fit"), std::string::npos);
  EXPECT_NE(error_of([&] { model.step(tokens.narrow(0, 0, 1), state); }).find("2 sequences, tokens were given for 1"), std::string::npos);
  EXPECT_NE(error_of([&] { model.prefill(tokens.narrow(1, 0, 1), std::nullopt, state); }).find("empty state"), std::string::npos);
  EXPECT_THROW(model.step(torch::full({2, 1}, 99), state), Error);
  EXPECT_TRUE(torch::equal(model.step(tokens.narrow(1, 0, 2), state), model.step(tokens.narrow(1, 0, 2), untouched)));
}

}  // namespace
}  // namespace pathattn
