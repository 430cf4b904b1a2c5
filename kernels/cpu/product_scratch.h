// Where the operands of a product of rows and a matrix lie aligned and padded while it is formed.
#pragma once

#include "kernels/cpu/layout.h"

namespace pathattn::cpu {

template <typename Compute>
struct ProductScratch {
  static constexpr int64_t kRows = 48;
  Compute *matrix, *rows, *products;  // [width], [kRows] and [kRows] padded rows
  ProductScratch(Arena& pieces, int64_t width)
      : matrix(pieces.take<Compute>(width * row_stride<Compute>(width))),
        rows(pieces.take<Compute>(kRows * row_stride<Compute>(width))),
        products(pieces.take<Compute>(kRows * row_stride<Compute>(width))) {}
};

}  // namespace pathattn::cpu
