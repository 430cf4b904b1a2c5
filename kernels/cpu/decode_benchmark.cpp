// decode_benchmark [threads [tokens ...]]: time of a decoding step, of merely reading as many bytes as it touches, and of the paper's rule, which
// rewrites every key at every step, made from the same SIMD steps. They take turns in one process; a result that the other does not confirm ends it.
#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode_benchmark.cpp"
#include "hwy/foreach_target.h"
// foreach_target.h comes first
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/rows-inl.h"
#include "kernels/tests/random.h"

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu::HWY_NAMESPACE {

// One step of the in-place rule for one head: keys and values [length + 1, width], of which the last are new. scores: [length + 1].
void step_in_place(const float* q, float* keys, const float* values, const float* w, float beta, int64_t length, int64_t width, float* scores,
                   float* o) {
  for (int64_t first = 0; first < length; first += kDecodeBlock) {  // what has been rewritten is read while it is in the cache
    const int64_t count = HWY_MIN(length - first, kDecodeBlock);
    reflect_rows(keys + first * width, count, width, w, beta);
    dot_rows(q, 1, keys + first * width, count, width, scores + first, 0);
  }
  dot_rows(q, 1, keys + length * width, 1, width, scores + length, 0);
  finish_scores<float>(scores, length + 1, 1 / std::sqrt(static_cast<float>(width)), nullptr, 0, 1);
  float highest, sum;
  exponentiate(scores, length + 1, &highest, &sum);
  weighted_rows(scores, 0, 1, values, length + 1, width, o);
  for (int64_t c = 0; c < width; ++c) o[c] /= sum;
}

// The sum of the floats, four vectors at a time: as fast as memory can be read.
float read_all(const float* data, int64_t count) {
  const Tag<float> d;
  const int64_t lanes = num_lanes<float>();
  Vector<float> sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  for (int64_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    for (int v = 0; v < 4; ++v) sums[v] = hn::Add(sums[v], load(data + i + v * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]))));
}

const char* instruction_set() { return hwy::TargetName(HWY_TARGET); }

}  // namespace pathattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pathattn::cpu {
namespace {

HWY_EXPORT(step_in_place);
HWY_EXPORT(read_all);
HWY_EXPORT(instruction_set);

constexpr int64_t kSteps = 64, kWidth = 128;

// Every task of a worker's share on a thread of its own.
struct Threads {
  int count;
  void operator()(int64_t num_tasks, Executor::Task task) const {
    const auto share = [&](int worker) {
      for (int64_t i = worker; i < num_tasks; i += count) task(i, worker);
    };
    std::vector<std::thread> others;
    for (int worker = 1; worker < count; ++worker) others.emplace_back(share, worker);
    share(0);
    for (std::thread& other : others) other.join();
  }
};

double seconds(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}

// Closed pages whose keys, values and (orthogonal) M are random, as if `tokens` had been prefilled.
struct Cache {
  DType dtype;
  int64_t query_heads, key_heads, tokens, capacity, length;
  std::vector<uint16_t> half[2];
  std::vector<float> single[2], carries, open_keys, open_carry;
  DecodingState state;

  Cache(DType type, int64_t hq, int64_t h, int64_t n)
      : dtype(type),
        query_heads(hq),
        key_heads(h),
        tokens(n),
        capacity(n + kDecodeChunk),
        length(n),
        carries(h * (capacity / kDecodeChunk) * kWidth * kWidth),
        open_keys(h * kDecodeChunk * kWidth),
        open_carry(h * 2 * kWidth * kWidth) {
    test::Random random(1);
    for (int i : {0, 1}) {
      single[i].resize(key_heads * capacity * kWidth);
      for (float& x : single[i]) x = static_cast<float>(random.uniform(-1.7, 1.7));
      if (dtype == DType::kFloat32) continue;
      half[i].resize(single[i].size());
      for (size_t at = 0; at < half[i].size(); ++at) half[i][at] = to_bfloat16(single[i][at]).bits;
    }
    for (int64_t page = 0; page < h * capacity / kDecodeChunk; ++page) {
      for (int64_t c = 0; c < kWidth; ++c) carries[(page * kWidth + c) * kWidth + (c + page) % kWidth] = random.uniform() < 0.5 ? -1 : 1;
    }
    for (int64_t head = 0; head < h; ++head) {  // the newest page's M is the identity
      float* newest = carries.data() + (head * (capacity / kDecodeChunk) + tokens / kDecodeChunk - 1) * kWidth * kWidth;
      for (int64_t c = 0; c < kWidth * kWidth; ++c) newest[c] = c % (kWidth + 1) == 0;
    }
    const auto data = [&](int i) -> void* { return dtype == DType::kFloat32 ? static_cast<void*>(single[i].data()) : half[i].data(); };
    state = {.sequences = 1,
             .capacity = capacity,
             .query_heads = hq,
             .key_heads = h,
             .key_width = kWidth,
             .value_width = kWidth,
             .dtype = dtype,
             .keys = data(0),
             .values = data(1),
             .gate_sums = nullptr,
             .carries = carries.data(),
             .open_keys = open_keys.data(),
             .open_carry = open_carry.data(),
             .lengths = &length};
  }
};

struct Step {
  std::vector<float> q, k, v, w, beta;
  std::vector<uint16_t> q_half, k_half, v_half;
};

Step make_step(int64_t query_heads, int64_t key_heads, test::Random& random) {
  Step step;
  for (const auto& [x, heads] : {std::pair{&step.q, query_heads}, {&step.k, key_heads}, {&step.v, key_heads}, {&step.w, key_heads}}) {
    x->resize(heads * kWidth);
    for (float& value : *x) value = static_cast<float>(random.normal());
  }
  for (int64_t h = 0; h < key_heads; ++h) {
    const auto w = step.w.begin() + h * kWidth;
    const float norm = std::sqrt(std::inner_product(w, w + kWidth, w, 0.0f));
    for (int64_t c = 0; c < kWidth; ++c) w[c] /= norm;
    step.beta.push_back(static_cast<float>(random.uniform(0, 2)));
  }
  for (const auto& [half, x] : {std::pair{&step.q_half, &step.q}, {&step.k_half, &step.k}, {&step.v_half, &step.v}}) {
    for (const float value : *x) half->push_back(to_bfloat16(value).bits);
  }
  return step;
}

// Bytes of state that a step of one key head reads or writes, the open chunk half full.
double bytes_of_step(const Cache& cache) {
  const double stored = cache.dtype == DType::kFloat32 ? 4 : 2, pages = static_cast<double>(cache.tokens / kDecodeChunk), k = kWidth;
  return cache.key_heads * (pages * kDecodeChunk * 2 * k * stored + (pages - 1) * k * k * 4 + kDecodeChunk / 2 * k * (4 + stored) + 3 * k * k * 4);
}

void measure(const Threads& threads, DType dtype, int64_t query_heads, int64_t key_heads, int64_t tokens) {
  Cache cache(dtype, query_heads, key_heads, tokens);
  const bool rewrite_too = dtype == DType::kFloat32 && query_heads == key_heads;
  const bool half = dtype == DType::kBFloat16;
  Problem p{.batch = 1,
            .tokens = 1,
            .query_heads = query_heads,
            .key_heads = key_heads,
            .key_width = kWidth,
            .value_width = kWidth,
            .dtype = dtype,
            .scale = 1 / std::sqrt(static_cast<double>(kWidth))};
  std::vector<std::byte> memory(
      64 + std::max(decode_workspace_size(p, cache.state, threads.count), carried_keys_workspace_size(cache.state, threads.count)));
  void* workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  const Executor executor{threads.count, threads};

  const int64_t row = key_heads * kWidth;
  std::vector<float> keys, values, scores(key_heads * cache.capacity), o_in_place(query_heads * kWidth), o(query_heads * kWidth);
  std::vector<uint16_t> o_half(query_heads * kWidth);
  if (rewrite_too) {
    keys.resize(key_heads * cache.capacity * kWidth);
    values = cache.single[1];
    if (!carried_keys(cache.state, cache.capacity, {keys.data(), 0, kWidth, cache.capacity * kWidth}, workspace, executor).ok()) std::exit(1);
  }
  test::Random random(2);
  const double bytes = bytes_of_step(cache);
  const std::vector<float> as_much(static_cast<size_t>(bytes / 4), 1.0f);
  const int64_t share = static_cast<int64_t>(as_much.size()) / key_heads;
  std::vector<double> ours, theirs, plain;
  float sum_of_all = 0;
  double error = 0;
  for (int64_t i = 0; i < kSteps; ++i) {
    Step step = make_step(query_heads, key_heads, random);
    ForwardArguments a{p,
                       {half ? static_cast<void*>(step.q_half.data()) : step.q.data(), 0, 0, kWidth},
                       {half ? static_cast<void*>(step.k_half.data()) : step.k.data(), 0, row, kWidth},
                       {half ? static_cast<void*>(step.v_half.data()) : step.v.data(), 0, row, kWidth},
                       {step.w.data(), 0, row, kWidth},
                       {step.beta.data(), 0, key_heads, 1},
                       {},
                       {half ? static_cast<void*>(o_half.data()) : o.data(), 0, 0, kWidth},
                       {}};
    ours.push_back(seconds([&] {
      if (!decode(a, cache.state, workspace, executor).ok()) std::exit(1);
    }));
    plain.push_back(seconds([&] {
      std::vector<float> sums(key_heads);
      threads(key_heads, [&](int64_t h, int) { sums[h] = HWY_DYNAMIC_DISPATCH(read_all)(as_much.data() + h * share, share); });
      sum_of_all += sums[0];
    }));
    if (!rewrite_too) continue;
    theirs.push_back(seconds([&] {
      threads(key_heads, [&](int64_t h, int) {
        const int64_t length = tokens + i, at = h * cache.capacity;
        std::copy_n(step.k.data() + h * kWidth, kWidth, keys.data() + (at + length) * kWidth);
        std::copy_n(step.v.data() + h * kWidth, kWidth, values.data() + (at + length) * kWidth);
        HWY_DYNAMIC_DISPATCH(step_in_place)
        (step.q.data() + h * kWidth, keys.data() + at * kWidth, values.data() + at * kWidth, step.w.data() + h * kWidth, step.beta[h], length, kWidth,
         scores.data() + at, o_in_place.data() + h * kWidth);
      });
    }));
    double difference = 0, size = 0;
    for (size_t c = 0; c < o.size(); ++c) difference += std::pow(o[c] - o_in_place[c], 2), size += std::pow(o_in_place[c], 2);
    error = std::max(error, std::sqrt(difference / size));
  }
  if (error > 1e-4 || sum_of_all <= 0) {
    std::fprintf(stderr, "decode and the in-place rule differ by %.1e: no speed is worth printing\n", error);
    std::exit(1);
  }
  std::printf("%-9s %3lld %3lld %7lld %8.1f %10.3f %12.3f", half ? "bfloat16" : "float32", static_cast<long long>(query_heads),
              static_cast<long long>(key_heads), static_cast<long long>(tokens), bytes / 1e6, median(ours) * 1e3, median(plain) * 1e3);
  if (rewrite_too) std::printf(" %12.3f %10.2f %8.0e", median(theirs) * 1e3, median(theirs) / median(ours), error);
  std::printf("\n");
  std::fflush(stdout);
}

void print_head(int threads) {
  std::printf("%s, %d thread(s), head width %lld, no gate, median of %lld steps\n", HWY_DYNAMIC_DISPATCH(instruction_set)(), threads,
              static_cast<long long>(kWidth), static_cast<long long>(kSteps));
  std::printf("%-9s %3s %3s %7s %8s %10s %12s %12s %10s %8s\n", "dtype", "HQ", "H", "tokens", "MB", "decode ms", "plain read ms", "in place ms",
              "in pl./dec.", "error");
}

}  // namespace
}  // namespace pathattn::cpu

int main(int count, char** arguments) {
  using namespace pathattn;
  const cpu::Threads threads{count > 1 ? std::clamp(std::atoi(arguments[1]), 1, 256) : 2};
  std::vector<int64_t> lengths;
  for (int i = 2; i < count; ++i) lengths.push_back(std::max(1L, std::atol(arguments[i]) / kDecodeChunk) * kDecodeChunk);
  if (lengths.empty()) lengths = {2048, 8192, 32768};
  cpu::print_head(threads.count);
  for (const int64_t tokens : lengths) {
    cpu::measure(threads, DType::kFloat32, 8, 8, tokens);
    cpu::measure(threads, DType::kBFloat16, 8, 8, tokens);
    cpu::measure(threads, DType::kBFloat16, 32, 8, tokens);
  }
}
#endif
