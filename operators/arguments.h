// Between tensors and kernels: the checks every operator makes, fresh outputs, and the kernels' argument structs.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "kernels/decoding_state.h"
#include "kernels/problem.h"
#include "kernels/stick_breaking.h"

namespace pathattn::operators {

using OptionalTensor = std::optional<at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // of q, k, v, w, beta, g

// What path_attention, its backward, prefill and decode take; path_attention.h has the shapes. Not to outlive the tensors.
struct Inputs {
  const at::Tensor &q, &k, &v;
  const OptionalTensor &w, &beta, &g;
  std::optional<double> scale;
  const OptionalTensor& cu_seqlens;
  bool gate_scaled;
};

// What stick_breaking_attention and its backward take; stick_breaking.h has the shapes.
Inputs stick_breaking_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::optional<double> scale,
                             const OptionalTensor& cu_seqlens);

// A decoding state's tensors; kernels/decoding_state.h has the shapes. Not to outlive the tensors.
struct State {
  const at::Tensor &keys, &values;
  const OptionalTensor &gate_sums, &carries, &open_keys, &open_carry;
  const at::Tensor& lengths;
};

at::ScalarType compute_type(at::ScalarType dtype);  // of w, beta, g and lse beside q of `dtype`: float64 for float64, otherwise float32

// Refuses a type of q, k and v that the device's kernels do not take. `what` begins the error.
void check_kernel_type(const char* what, at::ScalarType dtype, at::Device device);
// Each refuses what a kernel could not read (ranks, sizes, dtypes, devices) by an error that names the argument and quotes what it got.
// Sizes may be symbolic, and contents are not looked at: fake tensors pass through here too.
void check_inputs(const Inputs& inputs);
void check_state(const State& state);
void check_state(const State& state, const Inputs& inputs);
void check_results(const Inputs& inputs, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o, const OptionalTensor& d_lse,
                   const OptionalTensor& o_rest);
void check_stick_breaking_gradients(const Inputs& inputs, const at::Tensor& d_o, const OptionalTensor& d_rest);
// Refuses malformed documents as far as the host can see: the values of offsets on the CPU, of those on a device only how many there are.
void check_documents(const Inputs& inputs);
void check_tokens(const State& state, const c10::SymInt& tokens);

// Contiguous outputs for checked inputs, not initialised.
at::Tensor new_o(const Inputs& inputs);                                      // [B, T, HQ, V] like q
at::Tensor new_lse(const Inputs& inputs);                                    // [B, T, HQ]; rest too
at::Tensor new_gradient(const Inputs& inputs, const OptionalTensor& input);  // like input; [0] if not given
at::Tensor new_carried_keys(const State& state, const c10::SymInt& tokens);  // [sequences, tokens, H, K] in the compute type

// Checked inputs as kernels read them. Owns the copies that a non-contiguous last dimension or int32 offsets need.
struct KernelInputs {
  // cu_seqlens: the offsets as int64, contiguous, where the kernels read them; undefined if not given.
  KernelInputs(const Inputs& inputs, at::Tensor cu_seqlens);
  explicit KernelInputs(const Inputs& inputs);  // cu_seqlens where they are

  at::Tensor q, k, v, w, beta, g, cu_seqlens;  // undefined where not given
  Problem problem;
};

ConstView const_view(const at::Tensor& tensor);  // [B, T, heads(, width)]; null for an undefined or empty tensor
View view(const at::Tensor& tensor);

ForwardArguments forward_arguments(const KernelInputs& inputs, const at::Tensor& o, const at::Tensor& lse = {}, const at::Tensor& o_rest = {});

// What backward reads and writes besides the inputs: copies where a last dimension is not contiguous, and fresh gradients.
struct BackwardTensors {
  BackwardTensors(const Inputs& inputs, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o, const OptionalTensor& d_lse,
                  const OptionalTensor& o_rest);
  BackwardArguments arguments(const KernelInputs& inputs) const;

  at::Tensor o, lse, o_rest, d_o, d_lse;
  at::Tensor dq, dk, dv, dw, dbeta, dg;
};

StickBreakingForwardArguments stick_breaking_arguments(const KernelInputs& inputs, const at::Tensor& o, const at::Tensor& rest);

// The same for stick_breaking_attention_backward.
struct StickBreakingBackwardTensors {
  StickBreakingBackwardTensors(const Inputs& inputs, const at::Tensor& d_o, const OptionalTensor& d_rest);
  StickBreakingBackwardArguments arguments(const KernelInputs& inputs) const;

  at::Tensor d_o, d_rest;
  at::Tensor dq, dk, dv;
};

void check_status(const Status& status);  // turns a kernel's refusal into an error that quotes the value

// A checked state as kernels read it. Refuses tensors that are not contiguous. query_heads: of the calls to come.
DecodingState kernel_state(const State& state, int64_t query_heads);
DecodingState kernel_state(const State& state);  // query_heads from the gates, where the state has them

}  // namespace pathattn::operators
