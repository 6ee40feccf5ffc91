// Barriers in shared memory with phases, and what is known to whom: by thread, the clock up to
// which its accesses come before what follows.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "interpreter/interpreter.h"

namespace ikattn::interpreter {

using Known = std::vector<uint32_t>;

inline void join(Known& known, const Known& other) {
  known.resize(std::max(known.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) known[i] = std::max(known[i], other[i]);
}

// A copy by TMA.
struct BulkCopy {
  uint32_t address, barrier;
  std::vector<unsigned char> bytes;
  int thread;
  uint32_t clock;
};

struct PhaseBarrier {
  int arrivals = 0;  // that end a phase
  int thread = 0;    // that made the barrier
  uint32_t clock = 0;
  bool fenced = false;

  bool is_over(uint32_t parity) const { return (phase_ & 1) != (parity & 1); }
  const Known& released() const { return released_; }

  void arrive(int64_t bytes, const Known& known) {
    ++arrived_;
    bytes_ += bytes;
    join(arriving_, known);
    end();
  }
  // Receives a copy; false: nobody announced so many bytes.
  bool receive(const BulkCopy& copy) {
    bytes_ -= static_cast<int64_t>(copy.bytes.size());
    Known known(static_cast<size_t>(copy.thread) + 1);
    known.back() = copy.clock;
    join(arriving_, known);
    if (bytes_ < 0) return false;
    end();
    return true;
  }

 private:
  void end() {
    if (arrived_ < arrivals || bytes_ != 0) return;
    arrived_ = 0;
    ++phase_;
    released_ = arriving_;
  }

  int arrived_ = 0;
  int64_t bytes_ = 0;
  uint32_t phase_ = 0;
  Known arriving_, released_;
};

}  // namespace ikattn::interpreter
