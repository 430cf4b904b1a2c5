// What a sequence keeps between decoding steps. Keys of a closed chunk are never written again. docs/decoding.md explains why and what it costs.
//
// Tokens are cut into chunks of C = kDecodeChunk. A closed chunk's page holds values and keys carried to the chunk's end; one K x K matrix a chunk,
// M_J = G_{N-1} ... G_{J+1} (G: a chunk's product of H), carries a query from the open chunk's start to chunk J's end. The open chunk's keys are kept
// in the compute type: carried to the start of its pending block (kDecodeBlock tokens), those of the pending block itself to the present.
//   score(i, j in closed J) = scale * q_i P_pending P_open M_J k_j^T,  j in the open chunk before the pending block: q_i P_pending k_j^T,  else q_i
//   k_j^T
// Every matrix is stored transposed: its rows are then carried by later factors exactly as keys are, and a query goes through it by dot products.
// Without w, keys go to their page as they are and carries, open_keys and open_carry are null.
#pragma once

#include "kernels/problem.h"

namespace pathattn {

inline constexpr int64_t kDecodeChunk = 512;
inline constexpr int64_t kDecodeBlock = 64;

// Contiguous arrays owned by the caller; what lies beyond a sequence's length is never read. "compute" is float64 when dtype is, else float32.
struct DecodingState {
  int64_t sequences = 0, capacity = 0;  // capacity: tokens a sequence may reach, a multiple of C
  int64_t query_heads = 0, key_heads = 0, key_width = 0, value_width = 0;
  DType dtype = DType::kFloat32;  // of keys and values
  void* keys = nullptr;           // [sequences, key_heads, capacity, key_width]
  void* values = nullptr;         // [sequences, key_heads, capacity, value_width]
  void* gate_sums = nullptr;      // compute [sequences, query_heads, capacity]: closed chunk: g summed from the token to its chunk's end, both
                                  // included; open chunk: g itself; null without gate
  void* carries = nullptr;        // compute [sequences, key_heads, capacity / C, key_width, key_width]: M_J
  void* open_keys = nullptr;      // compute [sequences, key_heads, C, key_width]
  void* open_carry = nullptr;     // compute [sequences, key_heads, 2, key_width, key_width]: P_open, P_pending
  int64_t* lengths = nullptr;     // [sequences] tokens so far
};

// What every backend checks before it writes: the arguments (see check in problem.h), the state, and whether they belong together.
Status check(const DecodingState& state);
Status check(const Problem& problem, const DecodingState& state);  // shapes alone
Status check_prefill(const ForwardArguments& arguments, const DecodingState& state);
Status check_decode(const ForwardArguments& arguments, const DecodingState& state);
Status check_carried_keys(const DecodingState& state, int64_t tokens, const View& out);

}  // namespace pathattn
