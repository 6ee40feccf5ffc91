// Autocast kept out of what is to be computed in the types of its arguments.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace ikattn {

// While it lives autocast changes nothing: what is multiplied stays in its type.
struct ExactArithmetic {
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

}  // namespace ikattn
