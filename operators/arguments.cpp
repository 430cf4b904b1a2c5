#include "operators/arguments.h"

#include <ATen/ops/empty.h>
#include <c10/core/SymIntArrayRef.h>

#include <cmath>

namespace pathattn::operators {
namespace {

using Sizes = std::vector<c10::SymInt>;

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

DType kernel_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      return DType::kFloat32;
  }
}

at::Tensor with_contiguous_last(const at::Tensor& tensor) { return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous(); }

void check_tensor(const char* name, const at::Tensor& tensor, const char* layout, const Sizes& sizes, at::ScalarType dtype, at::Device device) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == c10::SymIntArrayRef(sizes), name, " must be ", layout, " = ", c10::SymIntArrayRef(sizes), ", got ",
                    tensor.sym_sizes());
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " must be ", dtype, ", got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.device() == device, name, " must be on ", device, ", got a tensor on ", tensor.device());
}

void check_width(const char* what, const c10::SymInt& width) {
  TORCH_CHECK_VALUE(width >= 1 && width <= kMaxHeadWidth, "the width of ", what, " must be 1 ... ", kMaxHeadWidth, ", got ", width);
}

void check_rank(const char* name, const at::Tensor& tensor, int64_t rank, const char* layout) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, name, " must be ", layout, ", got a tensor of sizes ", tensor.sym_sizes());
}

void check_cu_seqlens(const at::Tensor& cu_seqlens, const at::Tensor& q) {
  TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == at::kInt || cu_seqlens.scalar_type() == at::kLong, "cu_seqlens must be int32 or int64, got ",
                   cu_seqlens.scalar_type());
  check_rank("cu_seqlens", cu_seqlens, 1, "[documents + 1]");
  TORCH_CHECK_VALUE(cu_seqlens.sym_size(0) >= 1, "cu_seqlens must have documents + 1 entries, got none");
  TORCH_CHECK_VALUE(cu_seqlens.device() == q.device() || cu_seqlens.device().is_cpu(), "cu_seqlens must be on ", q.device(),
                    q.device().is_cpu() ? "" : " or on the CPU", ", got a tensor on ", cu_seqlens.device());
  TORCH_CHECK_VALUE(q.sym_size(0) == 1, "with cu_seqlens the documents lie in one batch row: q must have batch size 1, got ", q.sym_size(0));
}

at::Tensor int64_offsets(const Inputs& in) { return given(in.cu_seqlens) ? in.cu_seqlens->to(at::kLong).contiguous() : at::Tensor(); }

Problem problem_of(const Inputs& in, const at::Tensor& offsets) {
  Problem problem{.batch = in.q.size(0),
                  .tokens = in.q.size(1),
                  .query_heads = in.q.size(2),
                  .key_heads = in.k.size(2),
                  .key_width = in.q.size(3),
                  .value_width = in.v.size(3),
                  .dtype = kernel_type(in.q.scalar_type()),
                  .scale = in.scale.value_or(1 / std::sqrt(double(in.q.size(3)))),
                  .gate_scaled = in.gate_scaled};
  if (offsets.defined()) {
    problem.cu_seqlens = offsets.const_data_ptr<int64_t>();
    problem.num_documents = offsets.numel() - 1;
  }
  return problem;
}

}  // namespace

at::ScalarType compute_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

Inputs stick_breaking_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::optional<double> scale,
                             const OptionalTensor& cu_seqlens) {
  static const OptionalTensor none;
  return {q, k, v, none, none, none, scale, cu_seqlens, false};
}

// Half is for CUDA devices, double for the others; tensors without memory may stand for either.
void check_kernel_type(const char* what, at::ScalarType dtype, at::Device device) {
  const bool anywhere = dtype == at::kFloat || dtype == at::kBFloat16;
  if (device.is_cuda()) {
    TORCH_CHECK_TYPE(anywhere || dtype == at::kHalf, what, " must be float32, bfloat16 or float16 on a CUDA device, got ", dtype);
  } else {
    TORCH_CHECK_TYPE(anywhere || dtype == at::kDouble || (dtype == at::kHalf && device.is_meta()), what,
                     " must be float32, bfloat16 or float64, got ", dtype);
  }
}

void check_inputs(const Inputs& in) {
  check_rank("q", in.q, 4, "[B, T, HQ, K]");
  check_rank("k", in.k, 4, "[B, T, H, K]");
  check_rank("v", in.v, 4, "[B, T, H, V]");
  const auto dtype = in.q.scalar_type();
  const auto compute = compute_type(dtype);
  const auto device = in.q.device();
  check_kernel_type("q", dtype, device);
  const auto batch = in.q.sym_size(0), tokens = in.q.sym_size(1), query_heads = in.q.sym_size(2), key_width = in.q.sym_size(3);
  const auto key_heads = in.k.sym_size(2), value_width = in.v.sym_size(3);
  check_width("q", key_width);
  check_width("v", value_width);
  check_tensor("k", in.k, "[B, T, H, K] with B, T and K as q has", {batch, tokens, key_heads, key_width}, dtype, device);
  check_tensor("v", in.v, "[B, T, H, V] with B, T and H as k has", {batch, tokens, key_heads, value_width}, dtype, device);
  TORCH_CHECK_VALUE(key_heads >= 1, "k must have at least one head, got ", in.k.sym_sizes());
  TORCH_CHECK_VALUE(query_heads >= 1 && query_heads % key_heads == 0, "q's heads must be a multiple of k's, got ", query_heads, " and ", key_heads);
  TORCH_CHECK_VALUE(given(in.w) == given(in.beta), "w and beta go together: got only ", given(in.w) ? "w" : "beta");
  if (given(in.w)) {
    check_tensor("w", *in.w, "[B, T, H, K], as k is,", {batch, tokens, key_heads, key_width}, compute, device);
    check_tensor("beta", *in.beta, "[B, T, H]", {batch, tokens, key_heads}, compute, device);
  }
  if (given(in.g)) check_tensor("g", *in.g, "[B, T, HQ]", {batch, tokens, query_heads}, compute, device);
  if (given(in.cu_seqlens)) check_cu_seqlens(*in.cu_seqlens, in.q);
  TORCH_CHECK_VALUE(!in.scale || std::isfinite(*in.scale), "scale must be finite, got ", *in.scale);
}

void check_state(const State& state) {
  check_rank("keys of the decoding state", state.keys, 4, "[sequences, H, capacity, K]");
  check_rank("values of the decoding state", state.values, 4, "[sequences, H, capacity, V]");
  const auto dtype = state.keys.scalar_type();
  const auto compute = compute_type(dtype);
  const auto device = state.keys.device();
  check_kernel_type("keys of the decoding state", dtype, device);
  const auto sequences = state.keys.sym_size(0), heads = state.keys.sym_size(1), capacity = state.keys.sym_size(2), width = state.keys.sym_size(3);
  const auto chunks = capacity / kDecodeChunk;
  TORCH_CHECK_VALUE(heads >= 1, "keys of the decoding state must have at least one head, got ", state.keys.sym_sizes());
  TORCH_CHECK_VALUE(capacity >= 0 && capacity % kDecodeChunk == 0, "the decoding state's capacity must be a multiple of ", kDecodeChunk, ", got ",
                    capacity);
  check_width("the decoding state's keys", width);
  check_width("the decoding state's values", state.values.sym_size(3));
  check_tensor("values of the decoding state", state.values, "[sequences, H, capacity, V]", {sequences, heads, capacity, state.values.sym_size(3)},
               dtype, device);
  check_tensor("lengths of the decoding state", state.lengths, "[sequences]", {sequences}, at::kLong, device);
  TORCH_CHECK_VALUE(given(state.carries) == given(state.open_keys) && given(state.carries) == given(state.open_carry),
                    "carries, open_keys and open_carry of the decoding state go together: all or none must be given");
  if (given(state.carries)) {
    check_tensor("carries of the decoding state", *state.carries, "[sequences, H, capacity / 512, K, K]", {sequences, heads, chunks, width, width},
                 compute, device);
    check_tensor("open_keys of the decoding state", *state.open_keys, "[sequences, H, 512, K]", {sequences, heads, kDecodeChunk, width}, compute,
                 device);
    check_tensor("open_carry of the decoding state", *state.open_carry, "[sequences, H, 2, K, K]", {sequences, heads, 2, width, width}, compute,
                 device);
  }
  if (given(state.gate_sums)) {
    check_rank("gate_sums of the decoding state", *state.gate_sums, 3, "[sequences, HQ, capacity]");
    check_tensor("gate_sums of the decoding state", *state.gate_sums, "[sequences, HQ, capacity]",
                 {sequences, state.gate_sums->sym_size(1), capacity}, compute, device);
  }
}

void check_state(const State& state, const Inputs& in) {
  check_state(state);
  const auto sequences = given(in.cu_seqlens) ? in.cu_seqlens->sym_size(0) - 1 : in.q.sym_size(0);
  TORCH_CHECK_VALUE(state.keys.sym_size(0) == sequences, "the decoding state has ", state.keys.sym_size(0), " sequences, the call has ", sequences);
  TORCH_CHECK_VALUE(given(in.cu_seqlens) || in.q.sym_size(1) <= state.keys.sym_size(2), "the decoding state has room for ", state.keys.sym_size(2),
                    " tokens a sequence, the call has ", in.q.sym_size(1));
  TORCH_CHECK_VALUE(state.keys.sym_size(1) == in.k.sym_size(2), "the decoding state has ", state.keys.sym_size(1), " key heads, k has ",
                    in.k.sym_size(2));
  TORCH_CHECK_VALUE(state.keys.sym_size(3) == in.k.sym_size(3), "the decoding state's keys have width ", state.keys.sym_size(3), ", k has ",
                    in.k.sym_size(3));
  TORCH_CHECK_VALUE(state.values.sym_size(3) == in.v.sym_size(3), "the decoding state's values have width ", state.values.sym_size(3), ", v has ",
                    in.v.sym_size(3));
  TORCH_CHECK_TYPE(state.keys.scalar_type() == in.k.scalar_type(), "the decoding state holds ", state.keys.scalar_type(), ", k is ",
                   in.k.scalar_type());
  TORCH_CHECK_VALUE(state.keys.device() == in.k.device(), "the decoding state is on ", state.keys.device(), ", k on ", in.k.device());
  TORCH_CHECK_VALUE(given(state.carries) == given(in.w), "the decoding state was made ", given(state.carries) ? "with" : "without",
                    " w, the call is ", given(in.w) ? "with it" : "without");
  TORCH_CHECK_VALUE(given(state.gate_sums) == given(in.g), "the decoding state was made ", given(state.gate_sums) ? "with" : "without",
                    " a gate, the call is ", given(in.g) ? "with one" : "without");
  TORCH_CHECK_VALUE(!given(in.g) || state.gate_sums->sym_size(1) == in.g->sym_size(2), "the decoding state has ", state.gate_sums->sym_size(1),
                    " query heads, g has ", in.g->sym_size(2));
}

void check_results(const Inputs& in, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& d_o, const OptionalTensor& d_lse,
                   const OptionalTensor& o_rest) {
  const Sizes o_sizes{in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2), in.v.sym_size(3)};
  const Sizes lse_sizes{in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2)};
  const auto dtype = in.q.scalar_type();
  const auto device = in.q.device();
  check_tensor("o", o, "[B, T, HQ, V]", o_sizes, dtype, device);
  check_tensor("lse", lse, "[B, T, HQ]", lse_sizes, compute_type(dtype), device);
  check_tensor("d_o", d_o, "[B, T, HQ, V]", o_sizes, dtype, device);
  if (given(o_rest)) check_tensor("o_rest", *o_rest, "[B, T, HQ, V]", o_sizes, dtype, device);
  if (given(d_lse)) check_tensor("d_lse", *d_lse, "[B, T, HQ]", lse_sizes, compute_type(dtype), device);
}

void check_stick_breaking_gradients(const Inputs& in, const at::Tensor& d_o, const OptionalTensor& d_rest) {
  const auto batch = in.q.sym_size(0), tokens = in.q.sym_size(1), query_heads = in.q.sym_size(2);
  check_tensor("d_o", d_o, "[B, T, HQ, V]", {batch, tokens, query_heads, in.v.sym_size(3)}, in.q.scalar_type(), in.q.device());
  if (!given(d_rest)) return;
  check_tensor("d_rest", *d_rest, "[B, T, HQ]", {batch, tokens, query_heads}, compute_type(in.q.scalar_type()), in.q.device());
}

void check_tokens(const State& state, const c10::SymInt& tokens) {
  TORCH_CHECK_VALUE(tokens >= 0 && tokens <= state.keys.sym_size(2), "tokens must be 0 ... the decoding state's capacity (", state.keys.sym_size(2),
                    "), got ", tokens);
}

at::Tensor new_o(const Inputs& in) {
  return at::empty_symint({in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2), in.v.sym_size(3)}, in.q.options());
}

at::Tensor new_lse(const Inputs& in) {
  return at::empty_symint({in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2)}, in.q.options().dtype(compute_type(in.q.scalar_type())));
}

at::Tensor new_gradient(const Inputs& in, const OptionalTensor& input) {
  if (!given(input)) return at::empty({0}, in.q.options());
  return at::empty_symint(input->sym_sizes(), input->options());
}

at::Tensor new_carried_keys(const State& state, const c10::SymInt& tokens) {
  return at::empty_symint({state.keys.sym_size(0), tokens, state.keys.sym_size(1), state.keys.sym_size(3)},
                          state.keys.options().dtype(compute_type(state.keys.scalar_type())));
}

void check_documents(const Inputs& in) {
  if (!given(in.cu_seqlens)) return;
  TORCH_CHECK_VALUE(in.cu_seqlens->numel() > 1 || in.q.size(1) == 0, "the last entry of cu_seqlens must be the number of tokens, got one entry for ",
                    in.q.size(1), " tokens");
  if (!in.cu_seqlens->is_cpu()) return;
  const at::Tensor offsets = int64_offsets(in);
  Problem problem = problem_of(in, offsets);
  problem.dtype = DType::kFloat32;  // float16, which is refused where the host computes, has been checked
  check_status(check(problem));
}

KernelInputs::KernelInputs(const Inputs& in) : KernelInputs(in, int64_offsets(in)) {}

KernelInputs::KernelInputs(const Inputs& in, at::Tensor offsets)
    : q(with_contiguous_last(in.q)),
      k(with_contiguous_last(in.k)),
      v(with_contiguous_last(in.v)),
      cu_seqlens(std::move(offsets)),
      problem(problem_of(in, cu_seqlens)) {
  if (given(in.w)) w = with_contiguous_last(*in.w);
  if (given(in.beta)) beta = *in.beta;
  if (given(in.g)) g = *in.g;
}

ConstView const_view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

View view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.mutable_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

ForwardArguments forward_arguments(const KernelInputs& in, const at::Tensor& o, const at::Tensor& lse, const at::Tensor& o_rest) {
  return {in.problem,          const_view(in.q), const_view(in.k), const_view(in.v), const_view(in.w),
          const_view(in.beta), const_view(in.g), view(o),          view(lse),        view(o_rest)};
}

BackwardTensors::BackwardTensors(const Inputs& in, const at::Tensor& o_, const at::Tensor& lse_, const at::Tensor& d_o_, const OptionalTensor& d_lse_,
                                 const OptionalTensor& o_rest_)
    : o(with_contiguous_last(o_)),
      lse(lse_),
      o_rest(given(o_rest_) ? with_contiguous_last(*o_rest_) : at::Tensor()),
      d_o(with_contiguous_last(d_o_)),
      d_lse(d_lse_.value_or(at::Tensor())),
      dq(new_gradient(in, in.q)),
      dk(new_gradient(in, in.k)),
      dv(new_gradient(in, in.v)),
      dw(new_gradient(in, in.w)),
      dbeta(new_gradient(in, in.beta)),
      dg(new_gradient(in, in.g)) {}

BackwardArguments BackwardTensors::arguments(const KernelInputs& in) const {
  const View none;
  return {in.problem,
          const_view(in.q),
          const_view(in.k),
          const_view(in.v),
          const_view(in.w),
          const_view(in.beta),
          const_view(in.g),
          const_view(o),
          const_view(lse),
          const_view(o_rest),
          const_view(d_o),
          const_view(d_lse),
          view(dq),
          view(dk),
          view(dv),
          in.w.defined() ? view(dw) : none,
          in.w.defined() ? view(dbeta) : none,
          in.g.defined() ? view(dg) : none};
}

StickBreakingForwardArguments stick_breaking_arguments(const KernelInputs& in, const at::Tensor& o, const at::Tensor& rest) {
  return {in.problem, const_view(in.q), const_view(in.k), const_view(in.v), view(o), view(rest)};
}

StickBreakingBackwardTensors::StickBreakingBackwardTensors(const Inputs& in, const at::Tensor& d_o_, const OptionalTensor& d_rest_)
    : d_o(with_contiguous_last(d_o_)),
      d_rest(d_rest_.value_or(at::Tensor())),
      dq(new_gradient(in, in.q)),
      dk(new_gradient(in, in.k)),
      dv(new_gradient(in, in.v)) {}

StickBreakingBackwardArguments StickBreakingBackwardTensors::arguments(const KernelInputs& in) const {
  return {in.problem, const_view(in.q), const_view(in.k), const_view(in.v), const_view(d_o), const_view(d_rest), view(dq), view(dk), view(dv)};
}

void check_status(const Status& status) { TORCH_CHECK_VALUE(status.ok(), status.message, ", got ", status.value); }

DecodingState kernel_state(const State& state, int64_t query_heads) {
  const auto data = [](const char* name, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " of the decoding state must be contiguous, got strides ", tensor.strides());
    return tensor.mutable_data_ptr();
  };
  const auto optional_data = [&](const char* name, const OptionalTensor& tensor) { return given(tensor) ? data(name, *tensor) : nullptr; };
  return {.sequences = state.keys.size(0),
          .capacity = state.keys.size(2),
          .query_heads = query_heads,
          .key_heads = state.keys.size(1),
          .key_width = state.keys.size(3),
          .value_width = state.values.size(3),
          .dtype = kernel_type(state.keys.scalar_type()),
          .keys = data("keys", state.keys),
          .values = data("values", state.values),
          .gate_sums = optional_data("gate_sums", state.gate_sums),
          .carries = optional_data("carries", state.carries),
          .open_keys = optional_data("open_keys", state.open_keys),
          .open_carry = optional_data("open_carry", state.open_carry),
          .lengths = static_cast<int64_t*>(data("lengths", state.lengths))};
}

DecodingState kernel_state(const State& state) { return kernel_state(state, given(state.gate_sums) ? state.gate_sums->size(1) : state.keys.size(1)); }

}  // namespace pathattn::operators
