// AdamW (Loshchilov and Hutter, 2019) over a model's float32 parameters, with gradients added up over micro-batches and clipped by their global norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "model/language_model.h"
#include "train/settings.h"

namespace pathattn {

class AdamW {
 public:
  AdamW(const LanguageModel& model, const TrainSettings& settings);

  // Moves the gradients that a backward pass left in the parameters into this optimizer's sum.
  void add_gradients();
  // Global norm of the sum (before clipping), a scalar on its device; scales the sum so that its norm is at most gradient_clip.
  at::Tensor clip_gradients();
  // One update by the sum, which is then empty. Scalars on the parameters' device: the rate float32, and whether to update at all.
  void step(const at::Tensor& learning_rate, const at::Tensor& is_sound);

  // What an exact continuation needs besides the parameters: "first_moment.<parameter>" and "second_moment.<parameter>", this optimizer's own
  // tensors.
  std::map<std::string, at::Tensor> state() const;
  // Copies saved tensors of the same names and shapes into state(); `steps` updates had been made. Error naming a tensor that does not fit.
  void load(const std::map<std::string, at::Tensor>& saved, int64_t steps);

 private:
  struct Group {  // parameters that share a weight decay; the vectors run in parallel
    double weight_decay;
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters, gradients, first_moments, second_moments, steps;
  };
  std::vector<Group> groups_;
  double beta1_, beta2_, gradient_clip_;
};

}  // namespace pathattn
