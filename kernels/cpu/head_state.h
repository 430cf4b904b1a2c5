// One key head of one sequence of a DecodingState, typed.
#pragma once

#include "kernels/cpu/element.h"
#include "kernels/decoding_state.h"

namespace pathattn::cpu {

template <typename Stored>
struct HeadState {
  using Compute = ComputeOf<Stored>;

  int64_t sequence, key_head, group;  // group: query heads of the key head
  int64_t key_width, value_width, capacity;
  bool has_w, has_gate;
  Stored *keys, *values;                // [capacity, width]
  Compute* gates;                       // [group, capacity]
  Compute* carries;                     // [capacity / C, K, K], transposed as all that follow
  Compute *open_keys, *open, *pending;  // [C, K], P_open and P_pending [K, K]

  // `index` counts (sequence, key head) pairs.
  HeadState(const DecodingState& state, int64_t index)
      : sequence(index / state.key_heads),
        key_head(index % state.key_heads),
        group(state.query_heads / state.key_heads),
        key_width(state.key_width),
        value_width(state.value_width),
        capacity(state.capacity),
        has_w(state.carries != nullptr),
        has_gate(state.gate_sums != nullptr),
        keys(static_cast<Stored*>(state.keys) + index * capacity * key_width),
        values(static_cast<Stored*>(state.values) + index * capacity * value_width),
        gates(has_gate ? static_cast<Compute*>(state.gate_sums) + index * group * capacity : nullptr),
        carries(has_w ? static_cast<Compute*>(state.carries) + index * (capacity / kDecodeChunk) * key_width * key_width : nullptr),
        open_keys(has_w ? static_cast<Compute*>(state.open_keys) + index * kDecodeChunk * key_width : nullptr),
        open(has_w ? static_cast<Compute*>(state.open_carry) + index * 2 * key_width * key_width : nullptr),
        pending(has_w ? open + key_width * key_width : nullptr) {}

  Compute* carry(int64_t chunk) const { return carries + chunk * key_width * key_width; }
};

// Gates of a chunk that closes, of one query head: from g to the sum from the token to the chunk's end. In double: 512 roundings would show.
template <typename Compute>
void sum_gates(Compute* gates) {
  double sum = 0;
  for (int64_t j = kDecodeChunk - 1; j >= 0; --j) {
    sum += gates[j];
    gates[j] = static_cast<Compute>(sum);
  }
}

template <typename Element, typename AnyView>
auto* row(const AnyView& x, int64_t b, int64_t t, int64_t h) {
  if constexpr (std::is_same_v<AnyView, ConstView>) {
    return static_cast<const Element*>(x.data) + b * x.batch_stride + t * x.token_stride + h * x.head_stride;
  } else {
    return static_cast<Element*>(x.data) + b * x.batch_stride + t * x.token_stride + h * x.head_stride;
  }
}

}  // namespace pathattn::cpu
