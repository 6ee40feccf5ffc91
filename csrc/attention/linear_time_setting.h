// Whether calls may take linear time, as the environment has it.
#pragma once

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

#include "attention/params.h"

namespace ikattn {

inline LinearTime linear_time_setting() {
  static const LinearTime chosen = [] {
    const char* variable = std::getenv("IKATTN_LINEAR_TIME");
    const std::string asked = variable && *variable ? variable : "auto";
    if (asked == "never") return LinearTime::kNever;
    if (asked == "always") return LinearTime::kAlways;
    TORCH_CHECK(asked == "auto",
                "the environment variable IKATTN_LINEAR_TIME must be auto, never or always, got ",
                asked);
    return LinearTime::kAuto;
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
