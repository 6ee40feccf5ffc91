#include "attention/determinism.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <string>

namespace ikattn {
namespace {

bool means_batch(const char* what, const std::string& level) {
  TORCH_CHECK(level == "run" || level == "batch", what, " must be run or batch, got ", level);
  return level == "batch";
}

// One for all threads: those of autograd run the backward of calls of others.
std::atomic<bool>& batch_invariance() {
  static std::atomic<bool> setting = [] {
    const char* variable = std::getenv("IKATTN_DETERMINISTIC");
    return means_batch("the environment variable IKATTN_DETERMINISTIC",
                       variable && *variable ? variable : "run");
  }();
  return setting;
}

std::string deterministic() { return is_batch_invariant() ? "batch" : "run"; }

void set_deterministic(const std::string& level) {
  batch_invariance() = means_batch("set_deterministic: level", level);
}

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def("deterministic() -> str", deterministic);
  m.def("set_deterministic(str level) -> ()", set_deterministic);
}

}  // namespace

bool is_batch_invariant() { return batch_invariance(); }

}  // namespace ikattn
