// Comparing batches, and the check that a stream goes on exactly where it was, for tests.
#pragma once

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/stream.h"

namespace pathattn {

inline bool same(const Batch& left, const Batch& right) { return at::equal(left.tokens, right.tokens) && at::equal(left.targets, right.targets); }

inline std::vector<int64_t> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

// A new stream that continues where another had taken `taken` batches gives what that one gives after them.
inline void expect_exact_continuation(const std::function<std::unique_ptr<Stream>()>& make, int64_t taken, int64_t total) {
  const auto whole = make();
  for (int64_t i = 0; i < taken; ++i) whole->next();
  const std::string position = whole->position().dump();
  EXPECT_LT(position.size(), 300u);
  const auto resumed = make();
  resumed->next();  // a stream that was used already may seek too
  resumed->seek(nlohmann::json::parse(position));
  for (int64_t i = taken; i < total; ++i) ASSERT_TRUE(same(resumed->next(), whole->next())) << "batch " << i;
  EXPECT_EQ(resumed->position(), whole->position());
}

}  // namespace pathattn
