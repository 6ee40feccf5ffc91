// Memory that is not there is told with who asked for it and what for.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <utility>

#include "support/dispatch.h"

namespace ikattn {

// torch.OutOfMemoryError in Python.
class MissingMemory : public c10::OutOfMemoryError {
 public:
  using OutOfMemoryError::OutOfMemoryError;
};

// Whether `error` is of memory that torch could not have, and nobody has said yet for what.
bool is_of_memory(const c10::Error& error);

// make(), which allocates. Where there is no memory, torch says how much was asked for, and said(),
// which comes before that, by whom and for what.
template <typename Make, typename Said>
auto with_memory(const Make& make, const Said& said) {
  try {
    return make();
  } catch (const c10::Error& error) {
    if (!is_of_memory(error)) throw;
    throw MissingMemory({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                        said() + error.what_without_backtrace());
  }
}
template <typename Make>
auto with_memory_for(const char* function, const char* what, const Make& make) {
  return with_memory(make, [&] { return c10::str(function, ": no memory for ", what, ": "); });
}

// The tensor, which nobody has written yet. Where it is large and on the CPU, the system is asked
// for large pages, where it gives them: first writes of small ones, and random reads, take much
// longer.
at::Tensor in_large_pages(at::Tensor tensor);

// What the text about a kernel's own memory ends with.
constexpr const char* kWorkingMemory =
    " of its working memory, which is for features, sums or vectors of tokens, never for pairs: "
    "fewer sequences, heads or tokens in a call need less. ";

// The kernel kKernel of an operator, which names it where memory is missing for what torch's own
// operators make within.
template <Name kName, auto kKernel>
struct NamedKernel;
template <Name kName, typename Result, typename... Arguments, Result (*kKernel)(Arguments...)>
struct NamedKernel<kName, kKernel> {
  static Result call(Arguments... arguments) {
    return with_memory_for(kName.text, "what torch's operators make within it",
                           [&] { return kKernel(std::forward<Arguments>(arguments)...); });
  }
};
template <Name kName, auto kKernel>
void implement(torch::Library& m) {
  m.impl(kName.text, NamedKernel<kName, kKernel>::call);
}

}  // namespace ikattn
