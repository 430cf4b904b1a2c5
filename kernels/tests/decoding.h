// A decoding state in guarded memory, full of NaN, the CPU kernels' calls on it as the tests make them, and inputs for long sequences.
#pragma once

#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/tests/backend.h"
#include "kernels/tests/cases.h"

namespace pathattn::test {

class State {
 public:
  // Room for `capacity` tokens of each of the inputs' documents; with w and gate where the inputs have them.
  State(const Inputs& in, int64_t capacity, std::byte fill = std::byte{0xff});

  const DecodingState& view() const { return state_; }
  int64_t length(int64_t n) const { return state_.lengths[n]; }
  std::vector<std::byte> bytes() const;  // everything
  bool surroundings_untouched() const;

 private:
  DType dtype_;
  std::vector<GuardedMemory> arrays_;
  DecodingState state_;
};

// Throw like forward() of backend.h.
Outputs prefill(const Inputs& in, const State& state, int num_workers = 1);
Outputs decode(const Inputs& in, const State& state, int num_workers = 1, Workers::Order order = Workers::Order::kThreads);
Tensor carried_keys(const State& state, int64_t tokens, int num_workers = 1);

// Two query heads on one narrow key head, with a gate.
Case small_case(int64_t tokens);

// Inputs whose gates are so near 1 that tokens of the first pages still weigh something.
Inputs with_faint_gates(const Case& c);

}  // namespace pathattn::test
