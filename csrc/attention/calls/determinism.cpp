#include "attention/calls/determinism.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <string>

#include "support/settings.h"

namespace ikattn {
namespace {

// Returns the setting, one for all threads, for autograd runs a backward in another thread than the
// forward.
std::atomic<bool>& batch_invariance() {
  static std::atomic<bool> setting =
      choice_of("IKATTN_DETERMINISTIC", "run", {"run", "batch"}) == "batch";
  return setting;
}

std::string deterministic() { return is_batch_invariant() ? "batch" : "run"; }

void set_deterministic(const std::string& level) {
  TORCH_CHECK(level == "run" || level == "batch",
              "set_deterministic: level must be run or batch, got ", level);
  batch_invariance() = level == "batch";
}

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def("deterministic() -> str", deterministic);
  m.def("set_deterministic(str level) -> ()", set_deterministic);
}

}  // namespace

bool is_batch_invariant() { return batch_invariance(); }

}  // namespace ikattn
