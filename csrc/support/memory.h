// Errors of missing memory that name the function and the purpose.
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

// Tells whether `error` is torch's error of missing memory, without a purpose yet.
bool is_of_memory(const c10::Error& error);

// Returns make(), which allocates. Where memory is missing, the error is said(), which names the
// function and the purpose, and then torch's text with the size.
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

// Returns the tensor, not written yet. If it is large and on the CPU, asks the system for large
// pages, with which first writes and random reads are much faster.
at::Tensor in_large_pages(at::Tensor tensor);

// The end of the error about a kernel's working memory.
constexpr const char* kWorkingMemory =
    " of its working memory, which is for features, sums or vectors of tokens, never for pairs: "
    "fewer sequences, heads or tokens in a call need less. ";

// The kernel kKernel of an operator, with an error that names the operator where memory is missing
// for torch's operators within.
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
