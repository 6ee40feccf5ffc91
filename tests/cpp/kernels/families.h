// Families of kernels that the tests of kernels have on: all, unless one of them says otherwise.
#pragma once

#include <cstdlib>
#include <string>

namespace ikattn {

inline void set_families(const char* list) { setenv("IKATTN_KERNELS", list, 1); }
inline const bool all_families_are_on = (set_families("+unproven"), true);

// Other families, as long as it lives: IKATTN_KERNELS behind +unproven.
class Families {
 public:
  explicit Families(const char* list) { set_families((std::string("+unproven,") + list).c_str()); }
  ~Families() { set_families("+unproven"); }
};

}  // namespace ikattn
