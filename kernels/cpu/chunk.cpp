#include "kernels/cpu/chunk.h"

#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/chunk.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/prepare-inl.h"

#ifndef PATHATTN_CPU_CHUNK_SCRATCH_
#define PATHATTN_CPU_CHUNK_SCRATCH_
namespace pathattn::cpu {

template <typename T>
struct CarryScratch {
  T *w, *beta, *w_columns, *k_columns, *carried, *n, *x, *u, *g, *suffix;
  CarryScratch(Arena& arena, int64_t width) {
    const int64_t stride = row_stride<T>(width);
    for (T** rows : {&w, &w_columns, &k_columns, &carried, &u}) *rows = arena.take<T>(kTile * stride);
    beta = arena.take<T>(kTile);
    n = arena.take<T>(kTile * kTile);
    x = arena.take<T>(kTile * kTile);
    g = arena.take<T>(width * stride);
    suffix = arena.take<T>(2 * width * stride);
  }
};

}  // namespace pathattn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace pathattn::cpu {
namespace HWY_NAMESPACE {

template <typename T>
void carry(const Run& run, T* keys, T* product, void* memory) {
  Arena arena(memory);
  const int64_t width = run.key_width, stride = row_stride<T>(width), wide = padded<T>(width);
  CarryScratch<T> s(arena, width);
  Suffix<T> suffix(width, s.suffix);
  const int64_t k_bytes = run.dtype == DType::kBFloat16 ? 2 : sizeof(T);
  const DType compute = kDTypeOf<T>;
  for (int64_t first = (ceil_div(run.tokens, kTile) - 1) * kTile; first >= 0; first -= kTile) {
    const int64_t m = std::min(kTile, run.tokens - first), padded_rows = round_up(m, kBlock);
    load_rows<T>(static_cast<const char*>(run.k) + first * run.k_stride * k_bytes, run.dtype, run.k_stride, m, width, 1, s.u, stride, padded_rows,
                 wide);
    pack_columns(s.u, stride, padded_rows, width, s.k_columns);
    load_rows<T>(static_cast<const T*>(run.w) + first * run.w_stride, compute, run.w_stride, m, width, 1, s.w, stride, padded_rows, wide);
    load_rows<T>(static_cast<const T*>(run.beta) + first * run.beta_stride, compute, run.beta_stride, m, 1, 1, s.beta, 1, padded_rows, 1);
    prepare_tile(Tile<T>{padded_rows, width, stride, s.w, s.beta, s.w_columns, s.k_columns, s.n, s.x, s.u, s.g});
    suffix.carry(s.k_columns, s.carried, round_up(m, kPanel<T>));
    unpack_columns(s.carried, m, width, keys + first * width, width);
    suffix.append(s.g);
  }
  if (suffix.empty()) identity(width, s.suffix, stride);
  for (int64_t i = 0; i < width; ++i) std::memcpy(product + i * width, suffix.product() + i * stride, width * sizeof(T));
}

void carry_float32(const Run& run, void* keys, void* product, void* scratch) {
  carry(run, static_cast<float*>(keys), static_cast<float*>(product), scratch);
}
void carry_float64(const Run& run, void* keys, void* product, void* scratch) {
  carry(run, static_cast<double*>(keys), static_cast<double*>(product), scratch);
}

}  // namespace HWY_NAMESPACE
}  // namespace pathattn::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pathattn::cpu {

HWY_EXPORT(carry_float32);
HWY_EXPORT(carry_float64);

size_t carry_run_scratch_size(DType dtype, int64_t key_width) {
  Arena arena(nullptr);
  if (dtype == DType::kFloat64) {
    CarryScratch<double>(arena, key_width);
  } else {
    CarryScratch<float>(arena, key_width);
  }
  return arena.used();
}

void carry_run(const Run& run, void* keys, void* product, void* scratch) {
  if (run.dtype == DType::kFloat64) {
    HWY_DYNAMIC_DISPATCH(carry_float64)(run, keys, product, scratch);
  } else {
    HWY_DYNAMIC_DISPATCH(carry_float32)(run, keys, product, scratch);
  }
}

}  // namespace pathattn::cpu
#endif
