// Arithmetic in the types of its arguments, without autocast.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace ikattn {

// A guard under which autocast changes no type.
struct ExactArithmetic {
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

}  // namespace ikattn
