// How much of the C++ tests runs: everything where IKATTN_TESTS is `full`, otherwise a part that
// covers every kernel and every option once.
#pragma once

#include <cstdlib>
#include <string_view>

namespace ikattn {

inline bool runs_everything() {
  const char* tier = std::getenv("IKATTN_TESTS");
  return tier != nullptr && std::string_view(tier) == "full";
}

}  // namespace ikattn
