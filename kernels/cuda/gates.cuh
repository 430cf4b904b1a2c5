// How the logarithm of a forget gate enters sums.
#pragma once

namespace pathattn::cuda {

// -inf becomes a finite cut that outweighs any score of use, so that differences of sums stay exact numbers.
inline constexpr double kCut = -1e7;

}  // namespace pathattn::cuda
