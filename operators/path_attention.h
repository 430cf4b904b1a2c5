// PaTH attention as PyTorch operators (torch.ops.pathattn.*), with autograd. kernels/problem.h has the equations.
//
// Layout [B, T, heads, width]: q [B,T,HQ,K], k and w [B,T,H,K], v [B,T,H,V], beta [B,T,H], g [B,T,HQ]; HQ a multiple of H, K and V in 1..256.
// q, k, v: float32, bfloat16, on CPUs float64, on CUDA devices float16, all alike. w, beta, g: computed with in float64 beside float64, otherwise in
// float32; these functions convert other floating types (differentiably), the operators underneath refuse them.
// On a CUDA device work is queued on the current stream and nothing waits for it.
// A last dimension that is not contiguous is copied; any other stride is read as it is. Errors are c10::Error and name the argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace pathattn {

// (o [B,T,HQ,V] like q, lse [B,T,HQ] float32 or float64, natural logarithm). Differentiable once, in every tensor, through both results.
// cu_seqlens: int32 or int64 [documents + 1], B must be 1; on the CPU, where malformed ones are refused, or beside q on its CUDA device, where they
// give wrong numbers, never an access outside the tensors. scale: K^-1/2 if absent.
std::tuple<at::Tensor, at::Tensor> path_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& w,
                                                  const std::optional<at::Tensor>& beta, const std::optional<at::Tensor>& g,
                                                  std::optional<double> scale, const std::optional<at::Tensor>& cu_seqlens, bool gate_scaled);

// The tensors of a decoding state; kernels/decoding_state.h has their shapes. Undefined where not needed (no w, no gate).
struct DecodingTensors {
  at::Tensor keys, values, gate_sums, carries, open_keys, open_carry, lengths;

  // Empty state. dtype: of q, k, v. capacity is rounded up to whole chunks.
  static DecodingTensors create(int64_t sequences, int64_t capacity, int64_t query_heads, int64_t key_heads, int64_t key_width, int64_t value_width,
                                at::ScalarType dtype, bool has_w, bool has_gate, at::Device device = at::kCPU);
};

// Forward of whole documents that also fills an empty `state`; document n (batch row n, or span n of cu_seqlens) becomes sequence n.
// Returns o. No autograd. A refused call leaves the state as it was. On a CUDA device lengths cannot be looked at: prefill makes a used state anew,
// and tokens that do not fit are not kept.
at::Tensor prefill(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& w,
                   const std::optional<at::Tensor>& beta, const std::optional<at::Tensor>& g, std::optional<double> scale,
                   const std::optional<at::Tensor>& cu_seqlens, bool gate_scaled, DecodingTensors& state);

// T new tokens for each of the state's sequences, B = sequences. Returns o. No autograd. A refused call leaves the state as it was, but for one whose
// o is not finite though its inputs are (docs/numerics.md): that state is spoilt. On a CUDA device tokens that do not fit are not refused: they are
// not kept, and their o is NaN.
at::Tensor decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& w,
                  const std::optional<at::Tensor>& beta, const std::optional<at::Tensor>& g, std::optional<double> scale, bool gate_scaled,
                  DecodingTensors& state);

}  // namespace pathattn
