// Models whose weights are written down instead of learned: proofs that a PaTH transformer can do a task, to be run. Both follow state through tens
// of thousands of tokens, in float32 and in bfloat16. They have no short convolution: its SiLU is never below -0.278, and exact swaps need w = e_a -
// e_b.
//
// swap_identity: theorem 2.1 of arXiv 2505.16381 on data/swap_identity.h, one layer with two heads. A swap's H exchanges two coordinates of the key
// of kBegin. Head 1 starts from the key (-1, 1, 0, 0, 0), head 2 from (0, 0, -1, 1, 0), and both ask with a query along it: the product is 2 if the
// two marked elements are in place and at most 1 otherwise. All swaps have a key, untouched by any H, whose product is 1.5: attention goes to kBegin
// or to the swaps. The product of swaps is the identity if both heads see kBegin, for the fifth element has then no other place.
//
// flip_flop: theorem A.1 there, on data/flip_flop.h, two layers with one head. A key that erases the same direction in all older keys (beta = 1) is
// the only one that answers a query along it. In layer 1 these are the instructions, so that every bit learns whether it is written; in layer 2
// writes and their bits, so that a read finds the last of them, a bit. One layer without the convolution cannot: H depends on one token, and a bit
// does not say what stands before it.
#pragma once

#include <string>
#include <vector>

#include "model/language_model.h"

namespace pathattn {

const std::vector<std::string>& explicit_model_names();  // each is the kind of its data

LanguageModel explicit_model(const std::string& name, at::ScalarType compute_type = at::kFloat);  // Error lists the names

}  // namespace pathattn
