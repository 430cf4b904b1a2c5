// Stick-breaking attention of a layer with what it keeps of its sequences: every key and value, as they are.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "model/packing.h"
#include "operators/path_attention.h"

namespace pathattn {

// stick_breaking_attention over whole documents that also fills an empty `state`, made without w and gate: document n becomes sequence n.
at::Tensor stick_breaking_prefill(const at::Tensor& q_BTHD, const at::Tensor& k_BTHD, const at::Tensor& v_BTHD, const std::optional<Packing>& packing,
                                  DecodingTensors& state);

// T new tokens for each of the state's sequences, B = sequences, for which there must be room: these rows of stick_breaking_attention over
// everything so far.
at::Tensor stick_breaking_decode(const at::Tensor& q_BTHD, const at::Tensor& k_BTHD, const at::Tensor& v_BTHD, DecodingTensors& state);

}  // namespace pathattn
