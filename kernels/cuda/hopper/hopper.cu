// Entry points of the Hopper path: what it takes, workspace, groups of heads, the stages before attention that do not depend on the widths.

#include "kernels/cuda/hopper/hopper.h"

#include <algorithm>

#include "kernels/cuda/arena.h"
#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/gate_gradient.cuh"
#include "kernels/cuda/hopper/gate_sums.cuh"
#include "kernels/cuda/hopper/gradients.cuh"
#include "kernels/cuda/hopper/stages.h"
#include "kernels/cuda/tiles.cuh"

namespace pathattn::cuda::hopper {
namespace {

struct Sizes {
  int64_t units, group, K, V, max_tiles;
  int num_levels;
  bool path, gated;

  Sizes(const Problem& problem, bool has_w, bool has_gate)
      : units(problem.batch * problem.key_heads),
        group(problem.query_heads / std::max<int64_t>(problem.key_heads, 1)),
        K(problem.key_width),
        V(problem.value_width),
        max_tiles((problem.tokens + kTile - 1) / kTile + (problem.cu_seqlens ? problem.num_documents : 0)),
        num_levels(has_w ? hopper::num_levels((problem.tokens + kTile - 1) / kTile) : 1),
        path(has_w),
        gated(has_gate) {}
};

Workspace lay_out(const Sizes& sizes, int64_t units, bool backward, Arena& arena) {
  Workspace at{};
  const int64_t query_units = units * sizes.group, tiles = units * sizes.max_tiles, query_tiles = query_units * sizes.max_tiles;
  const int64_t key_image = kTile * sizes.K * 2, value_image = kTile * sizes.V * 2, matrix = sizes.K * sizes.K * 2;
  arena.take(at.num_tiles, 1);
  arena.take(at.next_item, 1);
  arena.take(at.tiles, sizes.max_tiles);
  for (int level = 0; level < sizes.num_levels; ++level) {
    arena.take(at.keys[level], tiles * key_image);
    if (!sizes.path) continue;
    const int64_t nodes = units * ((sizes.max_tiles >> (2 * level)) + 1);
    arena.take(at.matrices[level], nodes * matrix);
    if (level + 1 < sizes.num_levels) arena.take(at.suffixes[level], nodes * matrix);
  }
  arena.take(at.values, tiles * value_image);
  arena.take(at.key_factors, tiles);
  arena.take(at.value_factors, tiles);
  arena.take(at.queries, query_tiles * key_image);
  arena.take(at.query_factors, query_tiles);
  if (!backward) {
    arena.take(at.local_out, query_tiles * kTile * sizes.V / 2);
    arena.take(at.local_lse, query_tiles * kTile);
  }
  if (sizes.gated) {
    arena.take(at.gate_prefix, query_tiles * kTile);
    arena.take(at.gate_suffix, query_tiles * kTile);
    arena.take(at.gate_before, query_units * (sizes.max_tiles + 1));
  }
  if (backward) {
    arena.take(at.block_queries, query_tiles * (key_image / 2));
    arena.take(at.block_keys, tiles * (key_image / 2));
    if (sizes.path) {
      arena.take(at.block_matrices, tiles * 2 * matrix);
      arena.take(at.transform_w, tiles * key_image);
      arena.take(at.transform_factors, tiles * 2);
      arena.take(at.transform_u, tiles * key_image);
      arena.take(at.transform_x, tiles * 2 * kBlockBytes);
      arena.take(at.transform_y, tiles * 4 * kBlockBytes);
      arena.take(at.transform_rows, tiles * 2 * kTile);
    }
    if (sizes.num_levels > 1) arena.take(at.arrivals, tiles);
  }
  return at;
}

struct Backward {
  Gradients stages;
  GateGradient gate;
};

Backward lay_out_gradients(const Sizes& sizes, int64_t units, const Workspace& forward, Arena& arena) {
  Backward at{};
  const int64_t query_units = units * sizes.group, tiles = units * sizes.max_tiles, query_tiles = query_units * sizes.max_tiles;
  const int64_t key_image = kTile * sizes.K * 2, value_image = kTile * sizes.V * 2, matrix = sizes.K * sizes.K;
  OutputGradients& output = at.stages.output;
  arena.take(output.images, query_tiles * value_image);
  arena.take(output.factors, query_tiles);
  arena.take(output.score_factors, query_tiles);
  arena.take(output.delta, query_tiles * kTile);
  arena.take(output.row_offsets, query_tiles * kTile);

  FarGradient& far = at.stages.far;
  far.d_out = output.images;
  far.d_out_factors = output.factors;
  far.score_factors = output.score_factors;
  far.delta = output.delta;
  far.row_offsets = output.row_offsets;
  arena.take(far.key_order, sizes.max_tiles);
  arena.take(far.query_order, sizes.max_tiles);
  arena.take(far.first_segment, sizes.max_tiles);
  arena.take(far.largest, units);
  arena.take(far.query_steps, query_tiles);
  arena.take(far.key_steps, query_tiles);
  far.max_segments = sizes.path ? max_carries(sizes.max_tiles, sizes.num_levels) : 0;
  arena.take(far.segments, query_units * far.max_segments * key_image);
  arena.take(far.d_segments, query_units * far.max_segments * key_image);
  arena.take(far.d_segment_factors, query_units * far.max_segments);
  arena.take(far.d_queries, query_tiles * kTile * sizes.K);
  arena.take(far.d_values, tiles * kTile * sizes.V);
  for (int level = 0; level < sizes.num_levels; ++level) {
    arena.take(far.d_keys[level], tiles * kTile * sizes.K);
    if (sizes.path) arena.take(far.d_matrices[level], units * ((sizes.max_tiles >> (2 * level)) + 1) * matrix);
    at.stages.carry.dkeys[level] = far.d_keys[level];
    at.stages.carry.dmatrices[level] = far.d_matrices[level];
  }

  LocalGradients& local = at.stages.local;
  local.d_out = output.images;
  local.d_out_factors = output.factors;
  local.delta = output.delta;
  local.dqueries = far.d_queries;
  local.dkeys = far.d_keys[0];
  local.dvalues = far.d_values;
  local.score_factors = output.score_factors;
  if (sizes.group > 1) arena.take(local.sums, 8 * tiles * kBlock * std::max(sizes.K, sizes.V));
  PairGradients& pairs = at.stages.pairs;
  pairs.block_queries = forward.block_queries;
  pairs.block_keys = forward.block_keys;
  pairs.block_matrices = forward.block_matrices;
  if (sizes.path) arena.take(pairs.block_dmatrices, 2 * tiles * matrix);
  at.stages.carry.sums = pairs.block_dmatrices;  // not yet in use then
  if (sizes.path && sizes.group > 1) arena.take(pairs.key_sums, tiles * kBlock * sizes.K);
  local.dmatrices = pairs.block_dmatrices;
  if (sizes.gated) {
    arena.take(local.gate_sums, query_tiles * kTile);
    pairs.gate_sums = local.gate_sums;
    arena.take(far.row_sums, query_tiles * kTile);
    arena.take(far.column_sums, query_tiles * kTile);
    at.gate.row_sums = far.row_sums;
    at.gate.column_sums = far.column_sums;
    at.gate.own_sums = local.gate_sums;
    arena.take(at.gate.through, query_units * (sizes.max_tiles + 1));
  }
  return at;
}

// Of the current device; 0 where there is none.
int num_multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 0;
}

size_t bytes(const Sizes& sizes, int64_t units, bool backward) {
  Arena arena(nullptr);
  const Workspace forward = lay_out(sizes, units, backward, arena);
  if (backward) lay_out_gradients(sizes, units, forward, arena);
  return arena.used();
}

// As many units at a time as the cap and a grid's second dimension allow, in groups of about one size.
int64_t units_at_once(const Sizes& sizes, bool backward) {
  constexpr int64_t kGridLimit = 65535;
  if (sizes.units == 0) return 0;
  const int64_t of_all = static_cast<int64_t>(bytes(sizes, 0, backward)), one = static_cast<int64_t>(bytes(sizes, 1, backward)) - of_all;
  const int64_t most = std::clamp<int64_t>((static_cast<int64_t>(kWorkspaceCap) - of_all) / one, 1,
                                           std::max<int64_t>(1, std::min(sizes.units, kGridLimit / sizes.group)));
  const int64_t groups = (sizes.units + most - 1) / most;
  return (sizes.units + groups - 1) / groups;
}

template <typename AnyView>
bool aligned(const AnyView& view, int64_t bytes, int64_t element) {
  return reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && view.batch_stride * element % bytes == 0 &&
         view.token_stride * element % bytes == 0 && view.head_stride * element % bytes == 0;
}

Tensor tensor(const ConstView& view, DType dtype) {
  return {const_cast<void*>(view.data), view.batch_stride, view.token_stride, view.head_stride, dtype};
}
Tensor tensor(const View& view, DType dtype) { return {view.data, view.batch_stride, view.token_stride, view.head_stride, dtype}; }

Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {cudaGetErrorString(error), static_cast<int64_t>(error)};
}

template <typename Function>
Function for_widths(const Sizes& sizes, Function k64_v64, Function k64_v128, Function k128_v64, Function k128_v128) {
  return sizes.K == 64 ? (sizes.V == 64 ? k64_v64 : k64_v128) : (sizes.V == 64 ? k128_v64 : k128_v128);
}

cudaError_t prepare(const Sizes& sizes, const Call& call, int64_t units, cudaStream_t stream) {
  if (sizes.gated) {
    const unsigned query_units = static_cast<unsigned>(units * sizes.group);
    sum_gates_of_tiles<<<dim3(static_cast<unsigned>(sizes.max_tiles), query_units), kTile, 0, stream>>>(call);
    sum_over_tiles<<<query_units, 32, 0, stream>>>(call.at.gate_before, call.at.num_tiles, call.max_tiles);
    if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return for_widths(sizes, prepare_stages<64, 64>, prepare_stages<64, 128>, prepare_stages<128, 64>, prepare_stages<128, 128>)(call, units, stream);
}

cudaError_t attend(const Sizes& sizes, const Call& call, int64_t units, cudaStream_t stream) {
  if (cudaError_t error = cudaMemsetAsync(call.at.next_item, 0, sizeof(*call.at.next_item), stream); error != cudaSuccess) return error;
  return for_widths(sizes, attend_stage<64, 64>, attend_stage<64, 128>, attend_stage<128, 64>, attend_stage<128, 128>)(call, units,
                                                                                                                       num_multiprocessors(), stream);
}

cudaError_t differentiate(const Sizes& sizes, const Call& call, const Backward& at, int64_t units, cudaStream_t stream) {
  const auto stages = for_widths(sizes, gradient_stages<64, 64>, gradient_stages<64, 128>, gradient_stages<128, 64>, gradient_stages<128, 128>);
  if (cudaError_t error = stages(call, at.stages, units, stream); error != cudaSuccess) return error;
  if (!sizes.gated) return cudaSuccess;
  const unsigned query_units = static_cast<unsigned>(units * sizes.group);
  const dim3 tiles(static_cast<unsigned>(sizes.max_tiles), query_units);
  sum_gate_gradients<<<tiles, kTile, 0, stream>>>(call, at.gate);
  sum_over_tiles<<<query_units, 32, 0, stream>>>(at.gate.through, call.at.num_tiles, call.max_tiles);
  write_gate_gradients<<<tiles, kTile, 0, stream>>>(call, at.gate);
  return cudaGetLastError();
}

template <typename Arguments>
Call make_call(const Arguments& arguments, const Sizes& sizes) {
  const Problem& problem = arguments.problem;
  Call call{};
  call.q = tensor(arguments.q, problem.dtype);
  call.k = tensor(arguments.k, problem.dtype);
  call.v = tensor(arguments.v, problem.dtype);
  call.w = tensor(arguments.w, DType::kFloat32);
  call.beta = tensor(arguments.beta, DType::kFloat32);
  call.g = tensor(arguments.g, DType::kFloat32);
  call.out = tensor(arguments.o, problem.dtype);
  call.out_rest = tensor(arguments.o_rest, problem.dtype);
  call.lse = tensor(arguments.lse, DType::kFloat32);
  call.max_tiles = sizes.max_tiles;
  call.heads = static_cast<int>(problem.key_heads);
  call.group = static_cast<int>(sizes.group);
  call.num_levels = sizes.num_levels;
  call.scale = static_cast<float>(problem.scale);
  call.gate_factor = problem.gate_scaled ? call.scale : 1.f;
  return call;
}

// Runs `stages` over all units, as many at a time as fit.
template <typename Stages>
Status for_groups(const Problem& problem, const Sizes& sizes, int64_t at_once, Call call, cudaStream_t stream, Stages stages) {
  list_tiles<kTile><<<1, kListThreads, 0, stream>>>(problem.cu_seqlens, problem.cu_seqlens ? problem.num_documents : 1, problem.tokens,
                                                    sizes.max_tiles, call.at.tiles, call.at.num_tiles);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return status_of(error);
  for (call.first_unit = 0; call.first_unit < sizes.units; call.first_unit += at_once)
    if (cudaError_t error = stages(call, std::min(at_once, sizes.units - call.first_unit)); error != cudaSuccess) return status_of(error);
  return {};
}

bool on_hopper() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 && minor == 0;
}

// The widths, the format, and the inputs that forward and backward have in common.
template <typename Arguments>
bool supports_inputs(const Arguments& arguments) {
  const Problem& problem = arguments.problem;
  const auto width = [](int64_t w) { return w == 64 || w == 128; };
  return width(problem.key_width) && width(problem.value_width) && (problem.dtype == DType::kBFloat16 || problem.dtype == DType::kFloat16) &&
         aligned(arguments.q, 16, 2) && aligned(arguments.k, 16, 2) && aligned(arguments.v, 16, 2) && aligned(arguments.w, 16, 4);
}

}  // namespace

bool supports(const ForwardArguments& arguments) {
  return supports_inputs(arguments) && (arguments.g.data || !arguments.o_rest.data) && aligned(arguments.o, 4, 2) &&
         aligned(arguments.o_rest, 4, 2) && on_hopper();
}

bool supports(const BackwardArguments& arguments) {
  return supports_inputs(arguments) && (arguments.o_rest.data || !arguments.g.data) && aligned(arguments.o, 16, 2) &&
         aligned(arguments.o_rest, 16, 2) && aligned(arguments.d_o, 16, 2) && aligned(arguments.dq, 16, 2) && aligned(arguments.dk, 16, 2) &&
         aligned(arguments.dv, 16, 2) && aligned(arguments.dw, 16, 4) && on_hopper();
}

size_t forward_workspace_size(const Problem& problem, bool has_w, bool has_gate) {
  const Sizes sizes(problem, has_w, has_gate);
  return bytes(sizes, units_at_once(sizes, false), false);
}

size_t backward_workspace_size(const Problem& problem, bool has_w, bool has_gate) {
  const Sizes sizes(problem, has_w, has_gate);
  return bytes(sizes, units_at_once(sizes, true), true);
}

Status forward(const ForwardArguments& arguments, void* workspace, cudaStream_t stream) {
  const Sizes sizes(arguments.problem, arguments.w.data, arguments.g.data);
  if (arguments.problem.tokens == 0 || sizes.units == 0) return {};
  const int64_t at_once = units_at_once(sizes, false);
  Call call = make_call(arguments, sizes);
  Arena arena(workspace);
  call.at = lay_out(sizes, at_once, false, arena);
  return for_groups(arguments.problem, sizes, at_once, call, stream, [&](const Call& part, int64_t units) {
    if (cudaError_t error = prepare(sizes, part, units, stream); error != cudaSuccess) return error;
    return attend(sizes, part, units, stream);
  });
}

Status backward(const BackwardArguments& arguments, void* workspace, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  const Sizes sizes(problem, arguments.w.data, arguments.g.data);
  if (problem.tokens == 0 || sizes.units == 0) return {};
  const int64_t at_once = units_at_once(sizes, true);
  Call call = make_call(arguments, sizes);
  Arena arena(workspace);
  call.at = lay_out(sizes, at_once, true, arena);
  Backward at = lay_out_gradients(sizes, at_once, call.at, arena);
  at.stages.output.d_out = tensor(arguments.d_o, problem.dtype);
  at.stages.output.d_lse = tensor(arguments.d_lse, DType::kFloat32);
  at.stages.local.dq = tensor(arguments.dq, problem.dtype);
  at.stages.local.dk = tensor(arguments.dk, problem.dtype);
  at.stages.local.dv = tensor(arguments.dv, problem.dtype);
  at.stages.local.dw = tensor(arguments.dw, DType::kFloat32);
  at.stages.local.dbeta = tensor(arguments.dbeta, DType::kFloat32);
  at.gate.dg = tensor(arguments.dg, DType::kFloat32);
  return for_groups(problem, sizes, at_once, call, stream, [&](const Call& part, int64_t units) {
    if (cudaError_t error = prepare(sizes, part, units, stream); error != cudaSuccess) return error;
    at.stages.far.num_units = at.stages.local.num_units = static_cast<int>(units);
    return differentiate(sizes, part, at, units, stream);
  });
}

}  // namespace pathattn::cuda::hopper
