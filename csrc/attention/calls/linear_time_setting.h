// The setting of the environment for linear time.
#pragma once

#include "attention/calls/params.h"
#include "support/settings.h"

namespace ikattn {

inline LinearTime linear_time_setting() {
  static const LinearTime chosen = [] {
    const std::string asked = choice_of("IKATTN_LINEAR_TIME", "auto", {"auto", "never", "always"});
    return asked == "never"    ? LinearTime::kNever
           : asked == "always" ? LinearTime::kAlways
                               : LinearTime::kAuto;
  }();
  return chosen;
}

inline const char* name_of(LinearTime setting) {
  switch (setting) {
    case LinearTime::kNever:
      return "never";
    case LinearTime::kAlways:
      return "always";
    default:
      return "auto";
  }
}

}  // namespace ikattn
