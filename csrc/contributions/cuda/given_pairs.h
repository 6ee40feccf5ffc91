// Norms of pairs whose weights are given, on tensor cores.
#pragma once

#include <type_traits>

#include "contributions/cuda/streamed/streamed.h"

namespace ikattn::cuda {

// Returns the units of a variant's fragments: factor_fragments() makes them of two parts for all
// keys, [keys, 2, tiles, 32, 2], and behind them the units, [keys].
template <typename Word>
IKATTN_HOST_DEVICE inline auto units_of(Word* fragments, int64_t keys, int64_t H) {
  using Float = std::conditional_t<std::is_const_v<Word>, const float, float>;
  return reinterpret_cast<Float*>(fragments + keys * fragment_words(H, true));
}

bool takes_given_pairs(const PairParams& params, bool in_float64);
const char* given_pair_norms(const PairParams& params, Stream stream);

}  // namespace ikattn::cuda
