// Typed access to operators through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace ikattn {

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace ikattn
