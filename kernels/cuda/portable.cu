// Entry points of the portable path: workspace, groups of heads, launches.

#include <algorithm>

#include "kernels/cuda/arena.h"
#include "kernels/cuda/arguments.cuh"
#include "kernels/cuda/portable.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/stages.h"
#include "kernels/cuda/tiles.cuh"

namespace pathattn::cuda {
namespace {

constexpr int64_t kCtas = 264;  // two for each of 132 multiprocessors: what the stages with slots aim at

struct Sizes {
  int64_t T, units, group, value_width, width, max_tiles, slots;
  bool path, gated;
  bool rounded;  // o has been, to 16 bits: backward computes it again, since delta would carry its rounding into every gradient

  Sizes(const Problem& problem, bool has_w, bool has_gate)
      : T(problem.tokens),
        units(problem.batch * problem.key_heads),
        group(problem.query_heads / std::max<int64_t>(problem.key_heads, 1)),
        value_width(problem.value_width),
        path(has_w),
        gated(has_gate),
        rounded(problem.dtype != DType::kFloat32) {
    const int64_t widest = std::max(problem.key_width, problem.value_width);
    width = widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
    max_tiles = T / kTile + (problem.cu_seqlens ? problem.num_documents : 1);
    slots = std::clamp<int64_t>(kCtas / std::max<int64_t>(units, 1), 1, std::max<int64_t>(1, std::min<int64_t>(32, T / kChunk)));
  }
};

Workspace lay_out(const Sizes& sizes, int64_t units, bool backward, Arena& arena) {
  Workspace at{};
  const int64_t query_units = units * sizes.group, rows = units * sizes.T, query_rows = query_units * sizes.T, D = sizes.width;
  const int64_t tile_matrices = units * (sizes.T / kTile) * D * D, chunk_matrices = units * (sizes.T / kChunk) * D * D;
  arena.take(at.num_tiles, 1);
  arena.take(at.tiles, sizes.max_tiles);
  if (sizes.gated) arena.take(at.gate_sums, query_rows);
  if (sizes.path) {
    arena.take(at.u, rows * D);
    arena.take(at.x, rows * kTile);
    arena.take(at.tile_keys, rows * D);
    arena.take(at.chunk_keys, rows * D);
    arena.take(at.tile_g, tile_matrices);
    arena.take(at.suffix, tile_matrices);
    arena.take(at.chunk_g, chunk_matrices);
  }
  if (!backward) return at;
  if (sizes.rounded) {
    arena.take(at.out, query_rows * sizes.value_width);
    arena.take(at.lse, query_rows);
  }
  arena.take(at.delta, query_rows);
  if (sizes.gated) {
    arena.take(at.row_sums, query_rows);
    arena.take(at.column_sums, query_rows);
  }
  if (sizes.path) {
    arena.take(at.q_chunk, query_rows * D);
    arena.take(at.dq, query_rows * D);
    arena.take(at.da, query_rows * kTile);
    arena.take(at.dk, rows * D);
    arena.take(at.dv, rows * D);
    arena.take(at.dtile_g, tile_matrices);
    arena.take(at.dchunk_g, chunk_matrices * sizes.slots);
    arena.take(at.chain, query_units * sizes.slots * (sizes.T / kChunk + 1) * kTile * D);
    arena.take(at.du, rows * D);
    arena.take(at.rw, rows * D);
  }
  return at;
}

size_t bytes(const Sizes& sizes, int64_t units, bool backward) {
  Arena arena(nullptr);
  lay_out(sizes, units, backward, arena);
  return arena.used();
}

// As many units at a time as the cap and a grid's second dimension allow.
int64_t units_at_once(const Sizes& sizes, bool backward) {
  constexpr int64_t kGridLimit = 65535;
  const int64_t one = static_cast<int64_t>(bytes(sizes, 1, backward));
  return std::clamp<int64_t>(static_cast<int64_t>(portable::kWorkspaceCap) / one, 1,
                             std::max<int64_t>(1, std::min(sizes.units, kGridLimit / sizes.group)));
}

Call make_call(const Problem& problem, const Sizes& sizes) {
  Call call{};
  call.T = problem.tokens;
  call.heads = static_cast<int>(problem.key_heads);
  call.group = static_cast<int>(sizes.group);
  call.K = static_cast<int>(problem.key_width);
  call.V = static_cast<int>(problem.value_width);
  call.scale = static_cast<float>(problem.scale);
  call.gate_factor = problem.gate_scaled ? call.scale : 1.f;
  call.slots = static_cast<int>(sizes.slots);
  return call;
}

constexpr int64_t kMaxRowCtas = 4096;

// Runs `stages` over all units, as many at a time as fit.
template <typename Stages>
Status for_groups(const Problem& problem, const Sizes& sizes, bool backward, Call call, void* workspace, cudaStream_t stream, Stages stages) {
  const int64_t at_once = units_at_once(sizes, backward);
  Arena arena(workspace);
  call.at = lay_out(sizes, at_once, backward, arena);
  list_tiles<kTile><<<1, kListThreads, 0, stream>>>(problem.cu_seqlens, problem.cu_seqlens ? problem.num_documents : 1, sizes.T, sizes.max_tiles,
                                                    call.at.tiles, call.at.num_tiles);
  for (int64_t first = 0; first < sizes.units; first += at_once) {
    const int64_t count = std::min(at_once, sizes.units - first);
    call.first_unit = first;
    if (sizes.gated) {
      sum_gates<<<dim3(std::min(sizes.max_tiles, kMaxRowCtas), count * sizes.group), 32, 0, stream>>>(call);
    }
    if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return status_of(error);
    if (Status status = stages(call, count); !status.ok()) return status;
  }
  return {};
}

using Stage = cudaError_t (*)(const Call&, int64_t, int64_t, cudaStream_t);

Status run_stage(const Sizes& sizes, Stage stage_64, Stage stage_128, Stage stage_256, const Call& call, int64_t units, cudaStream_t stream) {
  const Stage stage = sizes.width == 64 ? stage_64 : sizes.width == 128 ? stage_128 : stage_256;
  return status_of(stage(call, sizes.max_tiles, units, stream));
}
Status prepare(const Sizes& sizes, const Call& call, int64_t units, cudaStream_t stream) {
  if (!sizes.path) return {};
  return run_stage(sizes, prepare_stages<64>, prepare_stages<128>, prepare_stages<256>, call, units, stream);
}
Status attend(const Sizes& sizes, const Call& call, int64_t units, cudaStream_t stream) {
  return run_stage(sizes, attend_stages<64>, attend_stages<128>, attend_stages<256>, call, units, stream);
}

}  // namespace

namespace portable {

size_t forward_workspace_size(const Problem& problem, bool has_w, bool has_gate) {
  const Sizes sizes(problem, has_w, has_gate);
  return bytes(sizes, units_at_once(sizes, false), false);
}

size_t backward_workspace_size(const Problem& problem, bool has_w, bool has_gate) {
  const Sizes sizes(problem, has_w, has_gate);
  return bytes(sizes, units_at_once(sizes, true), true);
}

Status forward(const ForwardArguments& arguments, void* workspace, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  const Sizes sizes(problem, arguments.w.data, arguments.g.data);
  if (sizes.T == 0 || sizes.units == 0) return {};
  Call call = make_call(problem, sizes);
  call.q = tensor(arguments.q, problem.dtype);
  call.k = tensor(arguments.k, problem.dtype);
  call.v = tensor(arguments.v, problem.dtype);
  call.w = tensor(arguments.w, DType::kFloat32);
  call.beta = tensor(arguments.beta, DType::kFloat32);
  call.g = tensor(arguments.g, DType::kFloat32);
  call.out = tensor(arguments.o, problem.dtype);
  call.out_rest = tensor(arguments.o_rest, problem.dtype);
  call.lse = tensor(arguments.lse, DType::kFloat32);
  return for_groups(problem, sizes, false, call, workspace, stream, [&](const Call& part, int64_t units) -> Status {
    if (Status status = prepare(sizes, part, units, stream); !status.ok()) return status;
    return attend(sizes, part, units, stream);
  });
}

Status backward(const BackwardArguments& arguments, void* workspace, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  const Sizes sizes(problem, arguments.w.data, arguments.g.data);
  if (sizes.T == 0 || sizes.units == 0) return {};
  Call call = make_call(problem, sizes);
  call.q = tensor(arguments.q, problem.dtype);
  call.k = tensor(arguments.k, problem.dtype);
  call.v = tensor(arguments.v, problem.dtype);
  call.w = tensor(arguments.w, DType::kFloat32);
  call.beta = tensor(arguments.beta, DType::kFloat32);
  call.g = tensor(arguments.g, DType::kFloat32);
  call.out = tensor(arguments.o, problem.dtype);
  call.lse = tensor(arguments.lse, DType::kFloat32);
  call.d_out = tensor(arguments.d_o, problem.dtype);
  call.d_lse = tensor(arguments.d_lse, DType::kFloat32);
  call.dq = tensor(arguments.dq, problem.dtype);
  call.dk = tensor(arguments.dk, problem.dtype);
  call.dv = tensor(arguments.dv, problem.dtype);
  call.dw = tensor(arguments.dw, DType::kFloat32);
  call.dbeta = tensor(arguments.dbeta, DType::kFloat32);
  call.dg = tensor(arguments.dg, DType::kFloat32);
  return for_groups(problem, sizes, true, call, workspace, stream, [&](Call part, int64_t units) -> Status {
    const int64_t query_units = units * sizes.group, query_rows = query_units * sizes.T;
    if (sizes.gated) {
      if (cudaError_t error = cudaMemsetAsync(part.at.row_sums, 0, query_rows * sizeof(float), stream); error != cudaSuccess) return status_of(error);
      if (cudaError_t error = cudaMemsetAsync(part.at.column_sums, 0, query_rows * sizeof(float), stream); error != cudaSuccess)
        return status_of(error);
    }
    if (sizes.path) {
      const size_t partial = units * sizes.slots * (sizes.T / kChunk) * sizes.width * sizes.width * sizeof(float);
      if (cudaError_t error = cudaMemsetAsync(part.at.dchunk_g, 0, partial, stream); error != cudaSuccess) return status_of(error);
    }
    if (Status status = prepare(sizes, part, units, stream); !status.ok()) return status;
    if (sizes.rounded) {
      const int64_t first = part.first_unit * sizes.group, head = sizes.T * problem.value_width;
      part.out = {part.at.out - first * head, problem.query_heads * head, problem.value_width, head, DType::kFloat32};
      part.lse = {part.at.lse - first * sizes.T, problem.query_heads * sizes.T, 1, sizes.T, DType::kFloat32};
      if (Status status = attend(sizes, part, units, stream); !status.ok()) return status;
    }
    constexpr int kRowsOfCta = kThreads / 32;
    sum_output_gradients<<<dim3((sizes.T + kRowsOfCta - 1) / kRowsOfCta, query_units), kThreads, 0, stream>>>(part);
    if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return status_of(error);
    if (Status status = run_stage(sizes, gradient_stages<64>, gradient_stages<128>, gradient_stages<256>, part, units, stream); !status.ok())
      return status;
    if (sizes.gated) gate_gradient<<<dim3(std::min(sizes.max_tiles, kMaxRowCtas), query_units), 32, 0, stream>>>(part);
    return status_of(cudaGetLastError());
  });
}

}  // namespace portable

}  // namespace pathattn::cuda
