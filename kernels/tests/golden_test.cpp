// Inputs and outputs of a public implementation (tests/golden/README.md): the reference and every backend must give the same numbers.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "base/safetensors.h"
#include "kernels/tests/cases.h"
#include "kernels/tests/decoding.h"
#include "kernels/tests/stick_breaking_backend.h"

namespace pathattn::test {
namespace {

class Golden : public testing::TestWithParam<const char*> {
 protected:
  Golden() : file_(PATHATTN_SOURCE_DIR "/tests/golden/" + std::string(GetParam()) + ".safetensors") {}

  bool has(const std::string& name) const { return file_.entries().contains(name); }

  // As stored, exactly; tensors [B, T, heads] have width 1. Null if the file has none of that name.
  Tensor read(const std::string& name) const {
    if (!has(name)) return {};
    const SafetensorsEntry& entry = file_.at(name);
    const DType stored = entry.dtype == "F64" ? DType::kFloat64 : entry.dtype == "F32" ? DType::kFloat32 : DType::kBFloat16;
    Tensor x(stored, {entry.shape[0], entry.shape[1], entry.shape[2], entry.shape.size() > 3 ? entry.shape[3] : 1});
    std::memcpy(x.out().data, entry.bytes.data(), entry.bytes.size());
    return x;
  }

  Inputs inputs() const {
    Inputs in;
    in.q = read("q"), in.k = read("k"), in.v = read("v"), in.w = read("w"), in.beta = read("beta"), in.g = read("g"), in.d_o = read("do");
    const Shape &q = in.q.shape(), &v = in.v.shape();
    in.shape = {.batch = q.batch,
                .tokens = q.tokens,
                .query_heads = q.heads,
                .key_heads = v.heads,
                .key_width = q.width,
                .value_width = v.width,
                .dtype = DType::kBFloat16,
                .scale = std::stod(file_.metadata().at("scale")),
                .gate_scaled = has("g") && file_.metadata().at("gate_convention") == "scaled"};
    if (has("cu_seqlens")) {
      const SafetensorsEntry& entry = file_.at("cu_seqlens");
      in.cu_seqlens.resize(entry.shape[0]);
      std::memcpy(in.cu_seqlens.data(), entry.bytes.data(), entry.bytes.size());
    }
    return in;
  }

  // Bounds for float64, where what remains is the rounding of tensors stored as F32, or the format's own where that is larger.
  void expect_golden(const Backend& backend, DType dtype) const {
    const Inputs in = inputs().to(dtype);
    Outputs out = forward(backend, in);
    backward(backend, in, out);
    const Tolerance format = tolerance({.dtype = dtype});
    const auto expect = [&](const char* name, const Tensor& got, double bound) {
      ASSERT_EQ(has(name), !got.empty()) << name;
      if (got.empty()) return;
      const Tensor want = read(name);
      EXPECT_LE(relative_error(got, want), std::max(bound, want.dtype() == DType::kFloat64 ? 1e-12 : 1e-7)) << name;
    };
    expect("o", out.o, format.o);
    expect(has("rem") ? "rem" : "lse", out.lse, format.o);  // what is left of a stick stands in the place of lse
    expect("dq", out.dq, format.dqkv);
    expect("dk", out.dk, format.dqkv);
    expect("dv", out.dv, format.dqkv);
    expect("dw", out.dw, format.dw);
    expect("dbeta", out.dbeta, format.dbeta_dg);
    expect("dg", out.dg, format.dbeta_dg);
  }

 private:
  SafetensorsFile file_;
};

TEST_P(Golden, reference) { expect_golden(reference_backend(), DType::kFloat64); }
TEST_P(Golden, cpu_f64) { expect_golden(cpu_backend(2), DType::kFloat64); }
TEST_P(Golden, cpu_f32) { expect_golden(cpu_backend(2), DType::kFloat32); }
TEST_P(Golden, cpu_bf16) { expect_golden(cpu_backend(2), DType::kBFloat16); }

// Keys after the last step of their document, as decoding goes on from them.
TEST_P(Golden, cpu_carried_keys) {
  if (!has("k_cache")) return;
  const Inputs in = inputs().to(DType::kFloat64);
  const State state(in, kDecodeChunk);
  prefill(in, state);
  const Tensor keys = carried_keys(state, in.shape.tokens), want = read("k_cache");
  for (int64_t n = 0; n < in.num_documents(); ++n) {
    const int64_t first = in.cu_seqlens.empty() ? 0 : in.cu_seqlens[n], length = in.document(n).shape.tokens;
    EXPECT_LE(relative_error(keys.rows(n, 0, length), want.rows(0, first, length)), want.dtype() == DType::kFloat64 ? 1e-12 : 1e-7)
        << "document " << n;
  }
}

class GoldenStickBreaking : public Golden {};
TEST_P(GoldenStickBreaking, reference) { expect_golden(stick_breaking_reference(), DType::kFloat64); }
TEST_P(GoldenStickBreaking, cpu_f64) { expect_golden(stick_breaking_cpu(2), DType::kFloat64); }
TEST_P(GoldenStickBreaking, cpu_f32) { expect_golden(stick_breaking_cpu(2), DType::kFloat32); }
TEST_P(GoldenStickBreaking, cpu_bf16) { expect_golden(stick_breaking_cpu(2), DType::kBFloat16); }

INSTANTIATE_TEST_SUITE_P(Files, GoldenStickBreaking, testing::Values("op_stickbreaking"), [](const auto& info) { return std::string(info.param); });

INSTANTIATE_TEST_SUITE_P(Files, Golden,
                         testing::Values("op_path_mha", "op_path_gqa_k64_v32", "op_path_gate_unscaled", "op_path_gate_scaled",
                                         "op_path_varlen_gate_unscaled", "op_path_edge_beta_w", "op_fox"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace pathattn::test
