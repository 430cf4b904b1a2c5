// Entry points of stick-breaking attention: checks, workspace, groups of heads, launches.
#include "kernels/cuda/stick_breaking.h"

#include <algorithm>

#include "kernels/cuda/arena.h"
#include "kernels/cuda/arguments.cuh"
#include "kernels/cuda/check.h"
#include "kernels/cuda/portable.h"
#include "kernels/cuda/stick_breaking.cuh"
#include "kernels/cuda/tiles.cuh"

namespace pathattn::cuda {
namespace {

struct Sizes {
  int64_t T, units, group, width, max_tiles;
  bool backward;

  Sizes(const Problem& problem, bool has_gradients)
      : T(problem.tokens),
        units(problem.batch * problem.key_heads),
        group(problem.query_heads / std::max<int64_t>(problem.key_heads, 1)),
        max_tiles(T / kTile + (problem.cu_seqlens ? problem.num_documents : 1)),
        backward(has_gradients) {
    const int64_t widest = std::max(problem.key_width, problem.value_width);
    width = widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
  }
};

void lay_out(const Sizes& sizes, int64_t units, Arena& arena, StickBreakingCall& stick) {
  arena.take(stick.call.at.num_tiles, 1);
  arena.take(stick.call.at.tiles, sizes.max_tiles);
  if (!sizes.backward) return;
  const int64_t notes = units * sizes.group * kSpan * (sizes.T / kTile + 1) * kTile;
  arena.take(stick.rests, notes);
  arena.take(stick.older, notes);
  arena.take(stick.call.at.dk, units * sizes.T * sizes.width);
  arena.take(stick.call.at.dv, units * sizes.T * sizes.width);
}

size_t bytes(const Sizes& sizes, int64_t units) {
  Arena arena(nullptr);
  StickBreakingCall stick{};
  lay_out(sizes, units, arena, stick);
  return arena.used();
}

// As many units at a time as the cap and a grid's second dimension allow.
int64_t units_at_once(const Sizes& sizes) {
  constexpr int64_t kGridLimit = 65535;
  return std::clamp<int64_t>(static_cast<int64_t>(portable::kWorkspaceCap / bytes(sizes, 1)), 1,
                             std::max<int64_t>(1, std::min(sizes.units, kGridLimit / sizes.group)));
}

template <typename Arguments>
StickBreakingCall make_call(const Arguments& arguments, const Sizes& sizes) {
  const Problem& problem = arguments.problem;
  StickBreakingCall stick{};
  Call& call = stick.call;
  call.T = problem.tokens;
  call.heads = static_cast<int>(problem.key_heads);
  call.group = static_cast<int>(sizes.group);
  call.K = static_cast<int>(problem.key_width);
  call.V = static_cast<int>(problem.value_width);
  call.scale = static_cast<float>(problem.scale);
  call.q = tensor(arguments.q, problem.dtype);
  call.k = tensor(arguments.k, problem.dtype);
  call.v = tensor(arguments.v, problem.dtype);
  return stick;
}

// Runs stages(call, units) over all units, as many at a time as fit.
template <typename Stages>
Status for_groups(const Problem& problem, const Sizes& sizes, StickBreakingCall stick, void* workspace, cudaStream_t stream, Stages stages) {
  const int64_t at_once = units_at_once(sizes);
  Arena arena(workspace);
  lay_out(sizes, at_once, arena, stick);
  list_tiles<kTile><<<1, kListThreads, 0, stream>>>(problem.cu_seqlens, problem.cu_seqlens ? problem.num_documents : 1, sizes.T, sizes.max_tiles,
                                                    stick.call.at.tiles, stick.call.at.num_tiles);
  for (int64_t first = 0; first < sizes.units; first += at_once) {
    stick.call.first_unit = first;
    stages(stick, std::min(at_once, sizes.units - first));
  }
  return status_of(cudaGetLastError());
}

dim3 grid(int64_t x, int64_t y) { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)); }

// At most 28 KiB: less than what needs leave.
template <int D>
constexpr int kSharedBytes = (kSlabFloats<D> + kScores) * static_cast<int>(sizeof(float));

template <int D>
void attend_stage(const Sizes& sizes, const StickBreakingCall& stick, int64_t units, cudaStream_t stream) {
  stick_breaking_attend<D><<<grid(sizes.max_tiles, units * sizes.group), kThreads, kSharedBytes<D>, stream>>>(stick);
}

template <int D>
void gradient_stage(const Sizes& sizes, StickBreakingCall stick, int64_t units, cudaStream_t stream) {
  for (int64_t first = 0; first < sizes.max_tiles; first += kSpan) {
    const int64_t end = std::min(first + kSpan, sizes.max_tiles);
    // No document has more than T / kTile tiles before a tile of its own.
    const int64_t first_key_tile = std::max<int64_t>(0, first - sizes.T / kTile);
    stick.first_tile = static_cast<int>(first);
    stick_breaking_queries<D><<<grid(end - first, units * sizes.group), kThreads, kSharedBytes<D>, stream>>>(stick);
    stick_breaking_keys<D><<<grid(end - first_key_tile, units), kThreads, kSharedBytes<D>, stream>>>(stick, static_cast<int>(first_key_tile));
  }
}

}  // namespace

size_t stick_breaking_forward_workspace_size(const Problem& problem) {
  const Sizes sizes(problem, false);
  return bytes(sizes, units_at_once(sizes));
}

size_t stick_breaking_backward_workspace_size(const Problem& problem) {
  const Sizes sizes(problem, true);
  return bytes(sizes, units_at_once(sizes));
}

Status stick_breaking_forward(const StickBreakingForwardArguments& arguments, void* workspace, cudaStream_t stream) {
  if (const Status status = check_on_host(arguments); !status.ok()) return status;
  const Problem& problem = arguments.problem;
  const Sizes sizes(problem, false);
  if (sizes.T == 0 || sizes.units == 0) return {};
  StickBreakingCall stick = make_call(arguments, sizes);
  stick.call.out = tensor(arguments.o, problem.dtype);
  stick.rest = tensor(arguments.rest, DType::kFloat32);
  const auto stage = sizes.width == 64 ? attend_stage<64> : sizes.width == 128 ? attend_stage<128> : attend_stage<256>;
  return for_groups(problem, sizes, stick, workspace, stream,
                    [&](const StickBreakingCall& part, int64_t units) { stage(sizes, part, units, stream); });
}

Status stick_breaking_backward(const StickBreakingBackwardArguments& arguments, void* workspace, cudaStream_t stream) {
  if (const Status status = check_on_host(arguments); !status.ok()) return status;
  const Problem& problem = arguments.problem;
  const Sizes sizes(problem, true);
  if (sizes.T == 0 || sizes.units == 0) return {};
  StickBreakingCall stick = make_call(arguments, sizes);
  stick.call.d_out = tensor(arguments.d_o, problem.dtype);
  stick.d_rest = tensor(arguments.d_rest, DType::kFloat32);
  stick.call.dq = tensor(arguments.dq, problem.dtype);
  stick.call.dk = tensor(arguments.dk, problem.dtype);
  stick.call.dv = tensor(arguments.dv, problem.dtype);
  const auto stage = sizes.width == 64 ? gradient_stage<64> : sizes.width == 128 ? gradient_stage<128> : gradient_stage<256>;
  return for_groups(problem, sizes, stick, workspace, stream,
                    [&](const StickBreakingCall& part, int64_t units) { stage(sizes, part, units, stream); });
}

}  // namespace pathattn::cuda
