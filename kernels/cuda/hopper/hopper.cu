// Entry points of the Hopper path: what it takes, workspace, groups of heads, the stages before attention that do not depend on the widths.

#include "kernels/cuda/hopper/hopper.h"

#include <algorithm>

#include "kernels/cuda/arena.h"
#include "kernels/cuda/hopper/call.cuh"
#include "kernels/cuda/hopper/gate_sums.cuh"
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

Workspace lay_out(const Sizes& sizes, int64_t units, Arena& arena) {
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
  arena.take(at.local_out, query_tiles * kTile * sizes.V / 2);
  arena.take(at.local_lse, query_tiles * kTile);
  if (sizes.gated) {
    arena.take(at.gate_prefix, query_tiles * kTile);
    arena.take(at.gate_suffix, query_tiles * kTile);
    arena.take(at.gate_before, query_units * (sizes.max_tiles + 1));
  }
  return at;
}

size_t bytes(const Sizes& sizes, int64_t units) {
  Arena arena(nullptr);
  lay_out(sizes, units, arena);
  return arena.used();
}

// As many units at a time as the cap and a grid's second dimension allow, in groups of about one size.
int64_t units_at_once(const Sizes& sizes) {
  constexpr int64_t kGridLimit = 65535;
  if (sizes.units == 0) return 0;
  const int64_t one = static_cast<int64_t>(bytes(sizes, 1));
  const int64_t most =
      std::clamp<int64_t>(static_cast<int64_t>(kWorkspaceCap) / one, 1, std::max<int64_t>(1, std::min(sizes.units, kGridLimit / sizes.group)));
  const int64_t groups = (sizes.units + most - 1) / most;
  return (sizes.units + groups - 1) / groups;
}

bool aligned(const ConstView& view, int64_t bytes, int64_t element) {
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

cudaError_t run(const Sizes& sizes, const Call& call, int64_t units, int multiprocessors, cudaStream_t stream) {
  if (sizes.gated) {
    const unsigned query_units = static_cast<unsigned>(units * sizes.group);
    sum_gates_of_tiles<<<dim3(static_cast<unsigned>(sizes.max_tiles), query_units), kTile, 0, stream>>>(call);
    sum_gates_over_tiles<<<query_units, 32, 0, stream>>>(call);
    if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  if (cudaError_t error = cudaMemsetAsync(call.at.next_item, 0, sizeof(*call.at.next_item), stream); error != cudaSuccess) return error;
  const auto stages = sizes.K == 64 ? (sizes.V == 64 ? forward_stages<64, 64> : forward_stages<64, 128>)
                                    : (sizes.V == 64 ? forward_stages<128, 64> : forward_stages<128, 128>);
  return stages(call, units, multiprocessors, stream);
}

}  // namespace

bool supports(const ForwardArguments& arguments) {
  const Problem& problem = arguments.problem;
  const auto width = [](int64_t w) { return w == 64 || w == 128; };
  if (!width(problem.key_width) || !width(problem.value_width)) return false;
  if (problem.dtype != DType::kBFloat16 && problem.dtype != DType::kFloat16) return false;
  const View& o = arguments.o;
  if (!aligned(arguments.q, 16, 2) || !aligned(arguments.k, 16, 2) || !aligned(arguments.v, 16, 2) || !aligned(arguments.w, 16, 4) ||
      !aligned({o.data, o.batch_stride, o.token_stride, o.head_stride}, 4, 2))
    return false;
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 && minor == 0;
}

size_t forward_workspace_size(const Problem& problem, bool has_w, bool has_gate) {
  const Sizes sizes(problem, has_w, has_gate);
  return bytes(sizes, units_at_once(sizes));
}

Status forward(const ForwardArguments& arguments, void* workspace, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  const Sizes sizes(problem, arguments.w.data, arguments.g.data);
  if (problem.tokens == 0 || sizes.units == 0) return {};
  int device = 0, multiprocessors = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return status_of(error);
  if (cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess)
    return status_of(error);
  Call call{};
  call.q = tensor(arguments.q, problem.dtype);
  call.k = tensor(arguments.k, problem.dtype);
  call.v = tensor(arguments.v, problem.dtype);
  call.w = tensor(arguments.w, DType::kFloat32);
  call.beta = tensor(arguments.beta, DType::kFloat32);
  call.g = tensor(arguments.g, DType::kFloat32);
  call.out = tensor(arguments.o, problem.dtype);
  call.lse = tensor(arguments.lse, DType::kFloat32);
  call.max_tiles = sizes.max_tiles;
  call.heads = static_cast<int>(problem.key_heads);
  call.group = static_cast<int>(sizes.group);
  call.num_levels = sizes.num_levels;
  call.scale = static_cast<float>(problem.scale);
  call.gate_factor = problem.gate_scaled ? call.scale : 1.f;
  const int64_t at_once = units_at_once(sizes);
  Arena arena(workspace);
  call.at = lay_out(sizes, at_once, arena);
  list_tiles<kTile><<<1, kListThreads, 0, stream>>>(problem.cu_seqlens, problem.cu_seqlens ? problem.num_documents : 1, problem.tokens,
                                                    sizes.max_tiles, call.at.tiles, call.at.num_tiles);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return status_of(error);
  for (int64_t first = 0; first < sizes.units; first += at_once) {
    call.first_unit = first;
    if (cudaError_t error = run(sizes, call, std::min(at_once, sizes.units - first), multiprocessors, stream); error != cudaSuccess)
      return status_of(error);
  }
  return {};
}

}  // namespace pathattn::cuda::hopper
