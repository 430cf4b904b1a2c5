#include "data/mqrar.h"

#include "base/error.h"

namespace pathattn {

Mqrar Mqrar::read(Recipe& recipe, int64_t tokens) {
  constexpr int64_t kMost = 1 << 20;
  const MqrarSettings defaults;
  const MqrarSettings settings = {.n_back = recipe.integer("data.n_back", defaults.n_back, 1, kMost),
                                  .num_keys = recipe.integer("data.num_keys", defaults.num_keys, 1, kMost),
                                  .num_values = recipe.integer("data.num_values", defaults.num_values, 2, kMost)};
  if (tokens % 2 != 0) fail("{}: MQRAR is pairs of tokens, so a row must be an even number of tokens, not {}", recipe.name(), tokens);
  if (tokens / 2 <= settings.n_back) {
    fail("{}: in {} pairs of tokens no key can recur {} times: raise train.tokens or lower data.n_back", recipe.name(), tokens / 2, settings.n_back);
  }
  return Mqrar(settings, tokens);
}

nlohmann::json Mqrar::identity() const {
  return {{"kind", "mqrar"}, {"n_back", settings_.n_back}, {"num_keys", settings_.num_keys}, {"num_values", settings_.num_values}};
}

void Mqrar::write(Random random, std::span<int64_t> tokens, std::span<int64_t> targets) const {
  std::vector<std::vector<int64_t>> values_of(static_cast<size_t>(settings_.num_keys));
  for (size_t i = 0; i < tokens.size(); i += 2) {
    const uint64_t key = random.below(static_cast<uint64_t>(settings_.num_keys));
    tokens[i] = static_cast<int64_t>(key);
    tokens[i + 1] = settings_.num_keys + static_cast<int64_t>(random.below(static_cast<uint64_t>(settings_.num_values)));
    std::vector<int64_t>& values = values_of[key];
    if (static_cast<int64_t>(values.size()) >= settings_.n_back) targets[i] = values[values.size() - static_cast<size_t>(settings_.n_back)];
    values.push_back(tokens[i + 1]);
  }
}

}  // namespace pathattn
