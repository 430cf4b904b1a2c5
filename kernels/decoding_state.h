// What a sequence keeps between decoding steps. Keys of a closed chunk are never written again.
//
// Tokens are cut into chunks of kDecodeChunk. A closed chunk's page holds keys carried to the chunk's end and values; one K x K matrix per chunk,
// M_J = G_{N-1} ... G_{J+1} (G: a chunk's product of H), carries a query from the open chunk's start to chunk J's end. The open chunk is kept in
// the compute type: its keys are carried to the start of its pending block (kDecodeBlock tokens), those of the pending block to the present.
//   score(i, j in closed J) = scale * q_i P_pending P_open M_J k_j^T,  j in the open chunk before the pending block: q_i P_pending k_j^T,  else q_i k_j^T
// Without w, keys go to their page as they are and carries, open_keys and open_carry are null.
#pragma once

#include "kernels/problem.h"

namespace pathattn {

inline constexpr int64_t kDecodeChunk = 512;
inline constexpr int64_t kDecodeBlock = 64;

// Contiguous arrays owned by the caller. C = kDecodeChunk; "compute" is float64 when dtype is, else float32.
struct DecodingState {
  int64_t sequences = 0, capacity = 0;     // capacity: tokens a sequence may reach, a multiple of C
  int64_t query_heads = 0, key_heads = 0, key_width = 0, value_width = 0;
  DType dtype = DType::kFloat32;           // of keys and values
  void* keys = nullptr;                    // [sequences, key_heads, capacity, key_width]
  void* values = nullptr;                  // [sequences, key_heads, capacity, value_width]
  void* gate_sums = nullptr;               // compute [sequences, query_heads, capacity]: g summed from the first token of the token's chunk to the token; null without gate
  void* carries = nullptr;                 // compute [sequences, key_heads, capacity / C, key_width, key_width]: M_J
  void* open_keys = nullptr;               // compute [sequences, key_heads, C, key_width]
  void* open_carry = nullptr;              // compute [sequences, key_heads, 2, key_width, key_width]: P_open, P_pending
  int64_t* lengths = nullptr;              // [sequences] tokens so far
};

}  // namespace pathattn
