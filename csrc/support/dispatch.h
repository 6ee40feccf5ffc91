// Typed access to operators through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace ikattn {

// A name as an argument of a template.
template <size_t kSize>
struct Name {
  char text[kSize];
  constexpr Name(const char (&given)[kSize]) { std::copy_n(given, kSize, text); }
};

// The arguments that stand for one of a call: the fields of a struct for which there is a function
// spelled_out(), otherwise itself.
template <typename Given>
auto arguments_of(Given&& given) {
  if constexpr (requires { spelled_out(given); }) {
    return spelled_out(given);
  } else {
    return std::forward_as_tuple(std::forward<Given>(given));
  }
}

// The operator ikattn::kName as a function.
template <Name kName, typename Signature>
struct Operator {
  template <typename... Given>
  auto operator()(Given&&... given) const {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(c10::str("ikattn::", kName.text).c_str(), "")
                               .template typed<Signature>();
    return std::apply([](auto&&... each) { return op.call(std::forward<decltype(each)>(each)...); },
                      std::tuple_cat(arguments_of(std::forward<Given>(given))...));
  }
};

}  // namespace ikattn
