#include "evaluate/bits_by_position.h"

#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numbers>

#include "base/error.h"
#include "base/progress.h"

namespace pathattn {

nlohmann::ordered_json evaluate_bits_by_position(const LanguageModel& model, const Batch& windows, const std::vector<int64_t>& edges) {
  constexpr int64_t kTokensAtOnce = 8192;
  at::NoGradGuard no_grad;
  const int64_t num_windows = windows.tokens.size(0), length = windows.tokens.size(1);
  const int64_t rows_at_once = std::max<int64_t>(1, kTokensAtOnce / length);
  at::Tensor nats_T = at::zeros({length}, at::kDouble), counted_T = at::zeros({length}, at::kLong);
  Progress progress("text", num_windows, "windows");
  for (int64_t row = 0; row < num_windows; row += rows_at_once) {
    const int64_t count = std::min(rows_at_once, num_windows - row);
    const at::Tensor targets_BT = windows.targets.narrow(0, row, count);
    const at::Tensor logits_BTV = model.forward(windows.tokens.narrow(0, row, count));
    check_logits(logits_BTV);
    const at::Tensor nats =
        at::cross_entropy_loss(logits_BTV.flatten(0, 1), targets_BT.flatten().to(model.device()), {}, at::Reduction::None, kIgnoreTarget);
    nats_T += nats.view({count, length}).sum(0, /*keepdim=*/false, at::kDouble).cpu();
    counted_T += targets_BT.ne(kIgnoreTarget).sum(0);
    progress.update(row + count);
  }
  nlohmann::ordered_json bits;
  for (size_t i = 0; i + 1 < edges.size(); ++i) {
    const auto total = [&](const at::Tensor& values_T) { return values_T.slice(0, edges[i], edges[i + 1]).sum().item<double>(); };
    bits[fmt::format("{}-{}", edges[i], edges[i + 1])] = total(nats_T) / std::numbers::ln2 / std::max(total(counted_T), 1.0);
  }
  return bits;
}

}  // namespace pathattn
