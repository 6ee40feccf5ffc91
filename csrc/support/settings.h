// The environment variables of the library, which are read here alone.
#pragma once

#include <array>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>

#include "support/proven.h"

namespace ikattn {

inline std::string environment(const char* variable) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

// Returns the value of a variable, one of `words`; `usual` where it is not set.
inline std::string choice_of(const char* variable, const char* usual,
                             std::initializer_list<const char*> words) {
  const std::string asked = environment(variable);
  if (asked.empty()) return usual;
  std::string listed;
  size_t left = words.size();
  for (const char* word : words) {
    if (asked == word) return asked;
    --left;
    listed += word + std::string(left > 1 ? ", " : left == 1 ? " or " : "");
  }
  throw std::runtime_error("the environment variable " + std::string(variable) + " must be " +
                           listed + ", got " + asked);
}

// The setting IKATTN_KERNELS of every family: a list such as "-hopper,+short,+unproven", in which
// later entries override earlier ones. A name without a sign has a plus.
struct KernelList {
  enum class Wish { kNone, kOn, kOff };
  std::array<Wish, kFamilies> wishes{};

  Wish of(Family family) const { return wishes[static_cast<size_t>(family)]; }

  static KernelList parsed(std::string_view text) {
    KernelList list;
    while (!text.empty()) {
      const size_t end = text.find_first_of(", ");
      const std::string_view item = text.substr(0, end);
      text = end == std::string_view::npos ? "" : text.substr(end + 1);
      if (!item.empty()) list.take(item);
    }
    return list;
  }

 private:
  void take(std::string_view item) {
    const bool has_sign = item[0] == '+' || item[0] == '-';
    const Wish wish = item[0] == '-' ? Wish::kOff : Wish::kOn;
    const std::string_view name = has_sign ? item.substr(1) : item;
    bool is_known = false;
    std::string listed = "unproven";
    for (size_t i = 0; i < kFamilies; ++i) {
      listed += std::string(", ") + kLedger[i].name;
      const bool is_meant =
          name == kLedger[i].name || (name == "unproven" && kLedger[i].gpu == nullptr);
      if (is_meant) wishes[i] = wish;
      is_known = is_known || is_meant;
    }
    if (is_known) return;
    throw std::runtime_error("the environment variable IKATTN_KERNELS names \"" +
                             std::string(name) +
                             "\", which is no family of kernels. It is a list of names with a plus "
                             "or a minus before each, of " +
                             listed);
  }
};

// Returns the list, parsed again where the variable has changed since the thread's last call.
inline const KernelList& kernel_list() {
  thread_local std::string text;
  thread_local KernelList list;
  const char* const variable = std::getenv("IKATTN_KERNELS");
  const std::string_view now = variable == nullptr ? "" : variable;
  if (now != text) {
    list = KernelList::parsed(now);
    text = now;
  }
  return list;
}

}  // namespace ikattn
