// What the Hopper kernels hand to each other: tiles, levels of nodes, and operands stored as float16 images of shared memory.
//
// Levels. A document is cut into tiles of 128 tokens; a node of level l is 4^l tiles in a row (level 0: a tile). Key node J of level l holds
// K->l, its keys carried to the node's end, and G = H_last ... H_first. A query tile, carried to its own start, meets the earlier siblings of its
// tile (those with the same parent), right to left, carried through each by q <- q G; it then stands at the start of its parent and meets the
// parent's earlier siblings, and so on; nodes of the last level have all earlier ones as siblings. Each node met is a segment: a dense rectangle of
// scores.
//
// Images. The 128 rows of a tile are D / 64 panels of [128 rows][64 columns] float16, each row 128 bytes in the 128-byte swizzle, so that a bulk copy
// puts them into shared memory as wgmma and ldmatrix read them. Rows beyond the tile's tokens are zero. Each tile of an operand has a power of two,
// its factor: number = factor * stored; so bfloat16's range fits float16's.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace pathattn::cuda::hopper {

inline constexpr int kTile = 128;       // tokens of a tile
inline constexpr int kBlock = 64;       // tokens of a block: the UT transform's
inline constexpr int kRadix = 4;        // children of a node
inline constexpr int kMaxTopNodes = 8;  // of the last level, in the longest document
inline constexpr int kMaxLevels = 10;

inline constexpr int kPanelBytes = kTile * 128;
template <int D>
inline constexpr int kImageBytes = D / 64 * kPanelBytes;  // a tile's rows
template <int D>
inline constexpr int kHalfImageBytes = kImageBytes<D> / 2;  // a block's, in panels of 64 rows
template <int D>
inline constexpr int kMatrixBytes = D / 64 * D * 128;  // a [D, D] matrix: D / 64 panels of [D rows][64 columns]

// Byte of element (row, column) in an image whose panels have `panel_rows` rows.
__host__ __device__ inline uint32_t image_byte(int row, int column, int panel_rows = kTile) {
  return (column / 64 * panel_rows + row) * 128 + (((column % 64 / 8) ^ (row % 8)) * 16 + column % 8 * 2);
}

// 128 tokens of one document, the last tile of a document perhaps fewer.
struct Tile {
  int64_t document;      // its document's first token
  int index, num_tiles;  // which tile of its document's how many
  int count;             // tokens
  __host__ __device__ int64_t first() const { return document + int64_t{index} * kTile; }
};

// Siblings of query tile `index` at `level`, right to left: key nodes last, last - 1, ... first (none where last < first).
struct Siblings {
  int first, last;
  __host__ __device__ Siblings(int index, int level, int num_levels) {
    const int node = index >> (2 * level);
    first = level + 1 == num_levels ? 0 : node / kRadix * kRadix;
    last = node - 1;
  }
};

inline int num_levels(int64_t longest_document_tiles) {
  int levels = 1;
  for (int64_t nodes = longest_document_tiles; nodes > kMaxTopNodes && levels < kMaxLevels; ++levels) nodes = (nodes + kRadix - 1) / kRadix;
  return levels;
}

}  // namespace pathattn::cuda::hopper
