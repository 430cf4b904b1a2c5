#include "model/stick_breaking.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/repeat_interleave.h>

#include <cmath>

#include "operators/stick_breaking.h"

namespace pathattn {
namespace {

// Row (b, t) goes to `position` of `sequence`, both int64 and broadcast to [B, T].
void keep(const at::Tensor& k_BTHD, const at::Tensor& v_BTHD, const at::Tensor& sequence, const at::Tensor& position, const DecodingTensors& state) {
  state.keys.transpose(1, 2).index_put_({sequence, position}, k_BTHD);
  state.values.transpose(1, 2).index_put_({sequence, position}, v_BTHD);
}

}  // namespace

at::Tensor stick_breaking_prefill(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<Packing>& packing,
                                  DecodingTensors& state) {
  if (packing) {
    const at::Tensor lengths = packing->cu_seqlens.diff();
    keep(k, v, at::repeat_interleave(lengths).unsqueeze(0), packing->positions.unsqueeze(0), state);
    state.lengths.copy_(lengths);
  } else {
    keep(k, v, at::arange(k.size(0), k.device()).unsqueeze(1), at::arange(k.size(1), k.device()).unsqueeze(0), state);
    state.lengths.fill_(k.size(1));
  }
  return std::get<0>(stick_breaking_attention(q, k, v, {}, packing ? std::optional(packing->cu_seqlens) : std::nullopt));
}

// The definition over the whole cache, products as sums of logarithms. Suffixes: N sequences, H key heads, G query heads of one, T tokens, C
// capacity.
at::Tensor stick_breaking_decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, DecodingTensors& state) {
  const int64_t sequences = q.size(0), tokens = q.size(1), head_dim = q.size(3), heads = k.size(2), group = q.size(2) / heads;
  const int64_t capacity = state.keys.size(2);
  const at::Tensor position_NT = state.lengths.unsqueeze(1) + at::arange(tokens, q.device());
  keep(k, v, at::arange(sequences, q.device()).unsqueeze(1), position_NT, state);
  state.lengths.add_(tokens);

  const at::ScalarType type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor q_NHGTD = q.transpose(1, 2).to(type).reshape({sequences, heads, group * tokens, head_dim}) / std::sqrt(double(head_dim));
  const at::Tensor z_NHGTC = at::matmul(q_NHGTD, state.keys.to(type).transpose(2, 3)).view({sequences, heads, group, tokens, capacity});
  const at::Tensor unseen_NHGTC = at::arange(capacity, q.device()) >= position_NT.view({sequences, 1, 1, tokens, 1});
  const at::Tensor log_kept = at::log_sigmoid(-z_NHGTC).masked_fill(unseen_NHGTC, 0);
  const at::Tensor log_kept_next = at::constant_pad_nd(log_kept.slice(-1, 1), {0, 1});
  const at::Tensor log_left = log_kept_next.flip(-1).cumsum(-1).flip(-1);  // by the keys after each
  const at::Tensor weights = (at::log_sigmoid(z_NHGTC) + log_left).exp().masked_fill(unseen_NHGTC, 0);
  const at::Tensor o = at::matmul(weights.view({sequences, heads, group * tokens, capacity}), state.values.to(type));
  return o.view({sequences, heads * group, tokens, -1}).transpose(1, 2).to(q.scalar_type());
}

}  // namespace pathattn
