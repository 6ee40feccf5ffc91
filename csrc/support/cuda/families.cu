// Families of kernels that are on; see families.h.
#include <link.h>

#include <fstream>
#include <map>
#include <mutex>

#include "support/cuda/families.h"
#include "support/cuda/launch.h"
#include "support/settings.h"

namespace ikattn::cuda {
namespace {

// Reads the build ID among a library's notes, in hexadecimal digits: the linker's hash of all of
// it.
std::string build_id_of(const char* notes, size_t bytes) {
  const char* const end = notes + bytes;
  while (notes + sizeof(ElfW(Nhdr)) <= end) {
    const auto* note = reinterpret_cast<const ElfW(Nhdr)*>(notes);
    const auto padded = [](size_t size) { return (size + 3) / 4 * 4; };
    const char* const content = notes + sizeof *note + padded(note->n_namesz);
    if (note->n_type == NT_GNU_BUILD_ID) {
      std::string id;
      for (size_t i = 0; i < note->n_descsz; ++i) {
        for (const int shift : {4, 0}) id += "0123456789abcdef"[content[i] >> shift & 15];
      }
      return id;
    }
    notes = content + padded(note->n_descsz);
  }
  return "";
}

// Names this library: the key changes wherever the library does.
std::string build_key() {
  std::string key;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* found) {
        const auto here = reinterpret_cast<ElfW(Addr)>(&build_id_of) - library->dlpi_addr;
        bool is_this = false;
        std::string id;
        for (const ElfW(Phdr)* part = library->dlpi_phdr;
             part != library->dlpi_phdr + library->dlpi_phnum; ++part) {
          if (part->p_type == PT_LOAD) is_this |= here - part->p_vaddr < part->p_memsz;
          if (part->p_type == PT_NOTE && id.empty()) {
            id = build_id_of(reinterpret_cast<const char*>(library->dlpi_addr + part->p_vaddr),
                             part->p_memsz);
          }
        }
        if (is_this) *static_cast<std::string*>(found) = id;
        return static_cast<int>(is_this);
      },
      &key);
  return key.empty() ? "unknown" : key;
}

// Returns $XDG_CACHE_HOME/ikattn/proven, or ~/.cache/ikattn/proven.
std::string proofs_file() {
  std::string cache = environment("XDG_CACHE_HOME");
  if (cache.empty()) cache = environment("HOME") + "/.cache";
  return cache + "/ikattn/proven";
}

// Reads the days of the families that a machine has proven, by name. A line of the file is a
// machine's key, the family's name and the day, apart by tabs.
std::map<std::string, std::string> proofs_of(const std::string& key) {
  std::map<std::string, std::string> days;
  std::ifstream file(proofs_file());
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size() + 1, key + "\t") != 0) continue;
    const size_t tab = line.find('\t', key.size() + 1);
    if (tab == std::string::npos) continue;
    days[line.substr(key.size() + 1, tab - key.size() - 1)] = line.substr(tab + 1);
  }
  return days;
}

std::mutex proofs_mutex;
std::map<int, std::map<std::string, std::string>> proofs;  // [device], each read once

}  // namespace

std::string machine_key() {
  static const std::string build = build_key();
  return build + "\t" + gpu_and_driver();
}

std::string proven_here(Family family) {
  const int device = current_device();
  const std::lock_guard<std::mutex> lock(proofs_mutex);
  if (proofs.count(device) == 0) proofs[device] = proofs_of(machine_key());
  const auto& here = proofs[device];
  const auto found = here.find(proof_of(family).name);
  return found == here.end() ? "" : found->second;
}

void forget_proofs() {
  const std::lock_guard<std::mutex> lock(proofs_mutex);
  proofs.clear();
}

bool is_on(Family family) {
  switch (kernel_list().of(family)) {
    case KernelList::Wish::kOn:
      return true;
    case KernelList::Wish::kOff:
      return false;
    default:
      return is_proven(family) || !proven_here(family).empty();
  }
}

std::string proven_by(Family family) {
  const Proof& proof = proof_of(family);
  if (proof.gpu != nullptr) return std::string(proof.gpu) + " at " + proof.commit;
  const std::string day = proven_here(family);
  return day.empty() ? "" : "this machine, on " + day;
}

}  // namespace ikattn::cuda
