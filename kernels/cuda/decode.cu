#include "kernels/cuda/decode.h"

#include "kernels/cuda/arguments.cuh"
#include "kernels/cuda/call.cuh"

namespace pathattn::cuda {
namespace {

constexpr int kChunkTokens = kDecodeChunk, kBlockTokens = kDecodeBlock, kWidth = kMaxHeadWidth, kWarps = kThreads / 32;
static_assert(kThreads >= kWidth, "a thread has a column of the output");

struct StateCall {
  Tensor q, k, v, w, beta, g, out;
  Tensor keys, values;  // pages [sequence, token, key head, width]
  float *gate_sums, *carries, *open_keys, *open_carry;
  int64_t* lengths;
  const int64_t* cu_seqlens;  // of a prefill, or null
  int64_t tokens, capacity;
  int heads, group, K, V;
  float scale, gate_factor;
  bool fills;  // prefill: begins with an empty state and computes no o
};

// One key head of one sequence.
struct Head {
  int64_t n, b, first, count, start;  // b: batch row of its new tokens first ... first + count - 1; start: tokens that the state has
  int h;
  float *gates, *carries, *open_keys, *open, *pending;  // gates [group, capacity], as kernels/cpu/head_state.h

  __device__ Head(const StateCall& call, int64_t unit) : n(unit / call.heads), b(n), first(0), count(call.tokens), start(0), h(unit % call.heads) {
    const int64_t matrix = int64_t{call.K} * call.K;
    gates = call.gate_sums + unit * call.group * call.capacity;
    carries = call.carries + unit * (call.capacity / kChunkTokens) * matrix;
    open_keys = call.open_keys + unit * kChunkTokens * call.K;
    open = call.open_carry + unit * 2 * matrix;
    pending = open + matrix;
    if (!call.fills) start = call.lengths[n];
    if (!call.cu_seqlens) return;
    b = 0;
    first = min(max(call.cu_seqlens[n], int64_t{0}), call.tokens);
    count = min(max(call.cu_seqlens[n + 1], first), call.tokens) - first;
  }
};

struct Shared {
  float w[kWidth], q[kWidth], moved_q[kWidth], page_q[kWidth];
  float scores[kChunkTokens], decays[kChunkTokens];
  float rows[kWarps][kWidth];
};

__device__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ int warp() { return threadIdx.x / 32; }
__device__ int lane() { return threadIdx.x % 32; }

// out_r = x . row(r), a warp a row; then all threads may read it.
template <typename Row>
__device__ void dot_rows(const float* x, int first, int last, int width, Row row, float* out) {
  for (int r = first + warp(); r < last; r += kWarps) {
    float sum = 0;
#pragma unroll 2
    for (int c = lane(); c < width; c += 32) sum = fmaf(x[c], row(r, c), sum);
    sum = warp_sum(sum);
    if (lane() == 0) out[r] = sum;
  }
  __syncthreads();
}

// A row in shared memory, of this warp alone, goes through a matrix.
__device__ void carry_row(float* row, const float* matrix, int width) {
  constexpr int kColumns = kWidth / 32;
  float carried[kColumns];
  for (int i = 0; i < kColumns; ++i) {
    const int c = lane() + 32 * i;
    carried[i] = 0;
    for (int j = 0; c < width && j < width; ++j) carried[i] = fmaf(row[j], matrix[j * width + c], carried[i]);
  }
  __syncwarp();
  for (int i = 0; i < kColumns; ++i) {
    if (lane() + 32 * i < width) row[lane() + 32 * i] = carried[i];
  }
  __syncwarp();
}

// rows <- rows * matrix
__device__ void carry_rows(Shared& shared, float* rows, int num_rows, const float* matrix, int width) {
  float* row = shared.rows[warp()];
  for (int r = warp(); r < num_rows; r += kWarps) {
    for (int c = lane(); c < width; c += 32) row[c] = rows[r * width + c];
    __syncwarp();
    carry_row(row, matrix, width);
    for (int c = lane(); c < width; c += 32) rows[r * width + c] = row[c];
  }
  __syncthreads();
}

// rows <- rows * H
__device__ void reflect_rows(float* rows, int num_rows, const float* w, float beta, int width) {
  for (int r = warp(); r < num_rows; r += kWarps) {
    float sum = 0;
    for (int c = lane(); c < width; c += 32) sum = fmaf(rows[r * width + c], w[c], sum);
    sum = beta * warp_sum(sum);
    for (int c = lane(); c < width; c += 32) rows[r * width + c] = fmaf(-sum, w[c], rows[r * width + c]);
  }
}

__device__ void set_identity(float* matrix, int width) {
  for (int i = threadIdx.x; i < width * width; i += kThreads) matrix[i] = i / width == i % width ? 1.f : 0.f;
}

// The new token joins the open chunk.
__device__ void append(const StateCall& call, const Head& head, Shared& shared, int64_t token, int64_t at) {
  const int index = at % kChunkTokens, block_start = index - index % kBlockTokens, K = call.K;
  for (int c = threadIdx.x; c < call.V; c += kThreads) call.values.set(head.n, at, head.h, c, call.v.at(head.b, token, head.h, c));
  for (int a = threadIdx.x; call.gate_sums && a < call.group; a += kThreads)
    head.gates[a * call.capacity + at] = call.g.at(head.b, token, head.h * call.group + a);
  if (!call.carries) {
    for (int c = threadIdx.x; c < K; c += kThreads) call.keys.set(head.n, at, head.h, c, call.k.at(head.b, token, head.h, c));
    return __syncthreads();
  }
  for (int c = threadIdx.x; c < K; c += kThreads) shared.w[c] = call.w.at(head.b, token, head.h, c);
  if (index == block_start) set_identity(head.pending, K);
  __syncthreads();
  const float beta = call.beta.at(head.b, token, head.h);
  reflect_rows(head.pending, K, shared.w, beta, K);
  reflect_rows(head.open_keys + block_start * K, index - block_start, shared.w, beta, K);
  for (int c = threadIdx.x; c < K; c += kThreads) head.open_keys[index * K + c] = call.k.at(head.b, token, head.h, c);
  __syncthreads();
}

// Softmax over chunks, newest first. Every thread has the same highest and sum, and one column of the output.
struct Softmax {
  float highest = -INFINITY, sum = 0, output = 0;

  // Adds keys `first` ... first + num_keys - 1, whose raw scores and sums of gates are in `shared`.
  __device__ void add(const StateCall& call, const Head& head, Shared& shared, int64_t first, int num_keys) {
    for (int j = threadIdx.x; j < num_keys; j += kThreads) {
      const float decay = call.gate_sums ? shared.decays[j] : 0.f;
      shared.scores[j] = decay == -INFINITY ? decay : fmaf(call.gate_factor, decay, call.scale * shared.scores[j]);
    }
    __syncthreads();
    float top = highest;
    for (int j = 0; j < num_keys; ++j) top = fmaxf(top, shared.scores[j]);
    __syncthreads();
    for (int j = threadIdx.x; j < num_keys; j += kThreads) shared.scores[j] = top == -INFINITY ? 0.f : expf(shared.scores[j] - top);
    __syncthreads();
    const float factor = top == -INFINITY ? 1.f : expf(highest - top);
    sum *= factor, output *= factor, highest = top;
    const int c = threadIdx.x;
#pragma unroll 1
    for (int j = 0; j < num_keys; ++j) {
      sum += shared.scores[j];
      if (c < call.V) output = fmaf(shared.scores[j], call.values.at(head.n, first + j, head.h, c), output);
    }
    __syncthreads();
  }
};

// Sums of the open chunk's gates after each key, in float64; returns that of all of them.
__device__ double sum_open_gates(const float* gates, int last, float* decays) {
  double sum = 0;
  for (int j = last; j >= 0; --j) {
    if (threadIdx.x == 0) decays[j] = static_cast<float>(sum);
    sum += gates[j];
  }
  __syncthreads();
  return sum;
}

// o of one query head of the newest token, which lies at `at`.
__device__ void attend(const StateCall& call, const Head& head, Shared& shared, int64_t token, int64_t at, int query_head) {
  const int index = at % kChunkTokens, block_start = index - index % kBlockTokens, K = call.K;
  const int64_t num_pages = at / kChunkTokens, chunk_start = num_pages * kChunkTokens;
  const float* gates = head.gates + query_head % call.group * call.capacity;
  const auto stored_key = [&](int64_t start) { return [&, start](int r, int c) { return call.keys.at(head.n, start + r, head.h, c); }; };
  const auto row_of = [K](const float* matrix) { return [matrix, K](int r, int c) { return matrix[r * K + c]; }; };
  for (int c = threadIdx.x; c < K; c += kThreads) shared.q[c] = call.q.at(head.b, token, query_head, c);
  __syncthreads();
  if (call.carries) {
    dot_rows(shared.q, block_start, index + 1, K, row_of(head.open_keys), shared.scores);
    dot_rows(shared.q, 0, K, K, row_of(head.pending), shared.moved_q);
    dot_rows(shared.moved_q, 0, block_start, K, row_of(head.open_keys), shared.scores);
    if (block_start > 0) {
      dot_rows(shared.moved_q, 0, K, K, row_of(head.open), shared.q);
    } else {
      for (int c = threadIdx.x; c < K; c += kThreads) shared.q[c] = shared.moved_q[c];
      __syncthreads();
    }
  } else {
    dot_rows(shared.q, 0, index + 1, K, stored_key(chunk_start), shared.scores);
  }
  Softmax softmax;
  double later = call.gate_sums ? sum_open_gates(gates + chunk_start, index, shared.decays) : 0;
  softmax.add(call, head, shared, chunk_start, index + 1);
  for (int64_t page = num_pages - 1; page >= 0; --page) {
    const int64_t start = page * kChunkTokens;
    const bool moves = call.carries && page < num_pages - 1;  // the newest page's carry is the identity
    if (moves) dot_rows(shared.q, 0, K, K, row_of(head.carries + page * K * K), shared.page_q);
    dot_rows(moves ? shared.page_q : shared.q, 0, kChunkTokens, K, stored_key(start), shared.scores);
    if (call.gate_sums) {
      for (int j = threadIdx.x; j < kChunkTokens; j += kThreads)
        shared.decays[j] = (j + 1 < kChunkTokens ? gates[start + j + 1] : 0.f) + static_cast<float>(later);
      __syncthreads();
      later += gates[start];
    }
    softmax.add(call, head, shared, start, kChunkTokens);
  }
  if (threadIdx.x < call.V) call.out.set(head.b, token, query_head, threadIdx.x, softmax.output / softmax.sum);
}

// What a full block and a full chunk turn into, once their last token, at `at`, has been read.
__device__ void close(const StateCall& call, const Head& head, Shared& shared, int64_t at) {
  const int index = at % kChunkTokens, block_start = index - index % kBlockTokens, K = call.K;
  const int64_t page = at / kChunkTokens, chunk_start = page * kChunkTokens;
  if (call.carries && index % kBlockTokens == kBlockTokens - 1) {
    if (block_start == 0) {
      for (int i = threadIdx.x; i < K * K; i += kThreads) head.open[i] = head.pending[i];
      __syncthreads();
    } else {
      carry_rows(shared, head.open_keys, block_start, head.pending, K);
      carry_rows(shared, head.open, K, head.pending, K);
    }
  }
  if (index != kChunkTokens - 1) return;
  for (int a = threadIdx.x; call.gate_sums && a < call.group; a += kThreads) {
    double sum = 0;
    for (int64_t j = at; j >= chunk_start; --j) {
      sum += head.gates[a * call.capacity + j];
      head.gates[a * call.capacity + j] = static_cast<float>(sum);
    }
  }
  if (!call.carries) return __syncthreads();
  for (int i = threadIdx.x; i < kChunkTokens * K; i += kThreads) call.keys.set(head.n, chunk_start + i / K, head.h, i % K, head.open_keys[i]);
  for (int64_t older = 0; older < page; ++older) carry_rows(shared, head.carries + older * K * K, K, head.open, K);
  set_identity(head.carries + page * K * K, K);
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) advance(StateCall call) {
  __shared__ Shared shared;
  const Head head(call, blockIdx.x);
  for (int64_t t = 0; t < head.count; ++t) {
    const int64_t token = head.first + t, at = head.start + t;
    const bool fits = at < call.capacity;
    if (fits) append(call, head, shared, token, at);
    for (int a = 0; a < call.group && !call.fills; ++a) {
      const int query_head = head.h * call.group + a;
      if (fits) attend(call, head, shared, token, at, query_head);
      if (!fits && threadIdx.x < call.V) call.out.set(head.b, token, query_head, threadIdx.x, NAN);
    }
    if (fits) close(call, head, shared, at);
  }
}

// Once every head has been advanced.
__global__ void set_lengths(StateCall call, int64_t sequences) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= sequences) return;
  const Head head(call, n * call.heads);
  call.lengths[n] = min(head.start + head.count, call.capacity);
}

// A warp a key.
__global__ void carry_keys(StateCall call, int64_t tokens, Tensor out) {
  __shared__ float rows[kWarps][kWidth];
  const Head head(call, blockIdx.y);
  const int K = call.K, in_chunk = head.start % kChunkTokens;
  const int64_t at = int64_t{blockIdx.x} * kWarps + warp(), num_pages = head.start / kChunkTokens, page = at / kChunkTokens;
  float* row = rows[warp()];
  if (at >= tokens) return;
  const bool is_open = call.carries && page == num_pages;
  for (int c = lane(); c < K; c += 32)
    row[c] = at >= head.start ? 0.f : is_open ? head.open_keys[at % kChunkTokens * K + c] : call.keys.at(head.n, at, head.h, c);
  __syncwarp();
  if (call.carries && at < head.start) {
    const bool has_pending = in_chunk % kBlockTokens > 0, is_pending = is_open && at % kChunkTokens >= in_chunk - in_chunk % kBlockTokens;
    if (page < num_pages - 1) carry_row(row, head.carries + page * K * K, K);
    if (!is_open && in_chunk >= kBlockTokens) carry_row(row, head.open, K);
    if (has_pending && !is_pending) carry_row(row, head.pending, K);
  }
  for (int c = lane(); c < K; c += 32) out.set(head.n, at, head.h, c, row[c]);
}

Tensor pages(void* data, const DecodingState& state, int64_t width) {
  return {data, state.key_heads * state.capacity * width, width, state.capacity * width, state.dtype};
}

StateCall make_call(const DecodingState& state) {
  StateCall call{};
  call.keys = pages(state.keys, state, state.key_width);
  call.values = pages(state.values, state, state.value_width);
  call.gate_sums = static_cast<float*>(state.gate_sums);
  call.carries = static_cast<float*>(state.carries);
  call.open_keys = static_cast<float*>(state.open_keys);
  call.open_carry = static_cast<float*>(state.open_carry);
  call.lengths = state.lengths;
  call.capacity = state.capacity;
  call.heads = static_cast<int>(state.key_heads);
  call.group = static_cast<int>(state.query_heads / state.key_heads);
  call.K = static_cast<int>(state.key_width);
  call.V = static_cast<int>(state.value_width);
  return call;
}

Status check_on_host(DecodingState state) {
  if (state.dtype == DType::kFloat64) return {"float64 is not supported on CUDA devices: use float32, bfloat16 or float16", 0};
  state.sequences = 0;  // lengths lie on the device
  return check(state);
}

Status run(const ForwardArguments& a, const DecodingState& state, bool fills, cudaStream_t stream) {
  if (Status status = check_on_host(state); !status.ok()) return status;
  if (state.sequences == 0 || state.capacity == 0 || (a.problem.tokens == 0 && !fills)) return {};
  StateCall call = make_call(state);
  const DType dtype = a.problem.dtype;
  call.q = tensor(a.q, dtype);
  call.k = tensor(a.k, dtype);
  call.v = tensor(a.v, dtype);
  call.w = tensor(a.w, DType::kFloat32);
  call.beta = tensor(a.beta, DType::kFloat32);
  call.g = tensor(a.g, DType::kFloat32);
  call.out = tensor(a.o, dtype);
  call.cu_seqlens = a.problem.cu_seqlens;
  call.tokens = a.problem.tokens;
  call.scale = static_cast<float>(a.problem.scale);
  call.gate_factor = a.problem.gate_scaled ? call.scale : 1.f;
  call.fills = fills;
  advance<<<state.sequences * state.key_heads, kThreads, 0, stream>>>(call);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return status_of(error);
  set_lengths<<<(state.sequences + kThreads - 1) / kThreads, kThreads, 0, stream>>>(call, state.sequences);
  return status_of(cudaGetLastError());
}

}  // namespace

Status fill_state(const ForwardArguments& arguments, const DecodingState& state, cudaStream_t stream) { return run(arguments, state, true, stream); }

Status decode(const ForwardArguments& arguments, const DecodingState& state, cudaStream_t stream) { return run(arguments, state, false, stream); }

Status carried_keys(const DecodingState& state, int64_t tokens, const View& out, cudaStream_t stream) {
  if (Status status = check_on_host(state); !status.ok()) return status;
  const int64_t units = state.sequences * state.key_heads;
  if (units == 0 || tokens == 0) return {};
  constexpr int64_t kGridLimit = 65535;
  if (units > kGridLimit) return {"carried keys are offered for at most 65535 heads of sequences together", units};
  const Tensor keys{out.data, out.batch_stride, out.token_stride, out.head_stride, DType::kFloat32};
  carry_keys<<<dim3((tokens + kWarps - 1) / kWarps, units), kThreads, 0, stream>>>(make_call(state), tokens, keys);
  return status_of(cudaGetLastError());
}

}  // namespace pathattn::cuda
