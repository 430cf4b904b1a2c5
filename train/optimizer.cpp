#include "train/optimizer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "model/parameters.h"

namespace pathattn {

AdamW::AdamW(const LanguageModel& model, const TrainSettings& settings)
    : groups_(2), beta1_(settings.beta1), beta2_(settings.beta2), gradient_clip_(settings.gradient_clip) {
  at::NoGradGuard no_grad;
  groups_[0].weight_decay = settings.weight_decay;
  groups_[1].weight_decay = 0;
  const std::vector<ParameterEntry> table = parameter_table(model.config());
  for (size_t i = 0; i < table.size(); ++i) {
    const auto& [name, parameter] = model.named_parameters()[i];
    Group& group = groups_[table[i].weight_decay ? 0 : 1];
    group.names.push_back(name);
    group.parameters.push_back(parameter);
    group.gradients.emplace_back();
    group.first_moments.push_back(at::zeros_like(parameter));
    group.second_moments.push_back(at::zeros_like(parameter));
    group.steps.push_back(at::zeros({}, parameter.options().dtype(at::kFloat).requires_grad(false)));
  }
}

void AdamW::add_gradients() {
  at::NoGradGuard no_grad;
  for (Group& group : groups_) {
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      at::Tensor& gradient = group.parameters[i].mutable_grad();
      at::Tensor& sum = group.gradients[i];
      if (!gradient.defined()) gradient = at::zeros_like(group.parameters[i]);
      if (sum.defined())
        sum.add_(gradient);
      else
        sum = gradient;
      gradient.reset();
    }
  }
}

at::Tensor AdamW::clip_gradients() {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const Group& group : groups_) {
    for (at::Tensor& norm : at::_foreach_norm(group.gradients)) norms.push_back(std::move(norm));
  }
  const at::Tensor norm = at::linalg_vector_norm(at::stack(norms));
  if (gradient_clip_ > 0) {
    const at::Tensor scale = (gradient_clip_ / norm).clamp_max(1);
    for (Group& group : groups_) at::_foreach_mul_(group.gradients, scale);
  }
  return norm;
}

void AdamW::step(const at::Tensor& learning_rate, const at::Tensor& is_sound) {
  at::NoGradGuard no_grad;
  constexpr double kEpsilon = 1e-8;
  const at::Tensor num_updates = is_sound.to(at::kFloat), unsound = 1 - num_updates;
  for (Group& group : groups_) {
    at::_foreach_add_(group.steps, num_updates);
    at::_fused_adamw_(group.parameters, group.gradients, group.first_moments, group.second_moments, {}, group.steps, learning_rate, beta1_, beta2_,
                      group.weight_decay, kEpsilon, /*amsgrad=*/false, /*maximize=*/false, /*grad_scale=*/{}, /*found_inf=*/unsound);
    group.gradients.assign(group.gradients.size(), at::Tensor());
  }
}

std::map<std::string, at::Tensor> AdamW::state() const {
  std::map<std::string, at::Tensor> state;
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.names.size(); ++i) {
      state.emplace("first_moment." + group.names[i], group.first_moments[i]);
      state.emplace("second_moment." + group.names[i], group.second_moments[i]);
    }
  }
  return state;
}

void AdamW::load(const std::map<std::string, at::Tensor>& saved, int64_t steps) {
  at::NoGradGuard no_grad;
  for (auto& [name, tensor] : state()) {
    const auto found = saved.find(name);
    if (found == saved.end()) fail("the optimizer's state lacks {}: it belongs to another model", name);
    if (found->second.sizes() != tensor.sizes() || found->second.scalar_type() != tensor.scalar_type()) {
      fail("the optimizer's state has {} in another shape or type: it belongs to another model", name);
    }
    tensor.copy_(found->second);
  }
  for (Group& group : groups_) {
    for (at::Tensor& count : group.steps) count.fill_(steps);
  }
}

}  // namespace pathattn
