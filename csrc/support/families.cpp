// The ledger of CUDA kernels, and what the environment and this machine say of it, as JSON.
#include <torch/library.h>

#include <string>

#include "support/settings.h"
#if defined(IKATTN_HAVE_CUDA)
#include "support/cuda/families.h"
#include "support/devices.h"
#endif

namespace ikattn {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\t' ? ' ' : c;
  }
  return out + "\"";
}

std::string field(const char* name, const char* text) {
  return ", " + quoted(name) + ": " + (text == nullptr ? "null" : quoted(text));
}

std::string kernel_families() {
  const KernelList& list = kernel_list();
  std::string found;
  for (size_t i = 0; i < kFamilies; ++i) {
    const auto family = static_cast<Family>(i);
    const Proof& proof = kLedger[i];
    std::string here;
    bool is_on = list.of(family) == KernelList::Wish::kNone
                     ? is_proven(family)
                     : list.of(family) == KernelList::Wish::kOn;
#if defined(IKATTN_HAVE_CUDA)
    if (cuda::why_no_kernels(-1).empty()) {  // a GPU that this machine's proofs may hold for
      here = cuda::proven_here(family);
      is_on = cuda::is_on(family);
    }
#endif
    found += std::string(found.empty() ? "" : ", ") + "{\"name\": " + quoted(proof.name) +
             field("does", proof.does) + field("instead", proof.instead) + field("gpu", proof.gpu) +
             field("commit", proof.commit) + field("since", proof.since) +
             field("counts_on", proof.counts_on) +
             field("here", here.empty() ? nullptr : here.c_str()) +
             ", \"on\": " + (is_on ? "true" : "false") + "}";
  }
  return "[" + found + "]";
}

std::string machine_key() {
#if defined(IKATTN_HAVE_CUDA)
  if (cuda::why_no_kernels(-1).empty()) return cuda::machine_key();
#endif
  return "";
}

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def("kernel_families() -> str", kernel_families);
  m.def("machine_key() -> str", machine_key);
}

}  // namespace
}  // namespace ikattn
