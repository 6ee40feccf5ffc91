// The ledger of CUDA kernels: the GPU on which each family last passed its tests and was faster
// than the kernels that it replaces. Calls take proven families alone, unless IKATTN_KERNELS or the
// proof of this machine says otherwise (support/cuda/families.h). docs/guide/cuda.md has it as a
// table, which tools/ledger.py writes.
#pragma once

#include <cstddef>

namespace ikattn {

enum class Family {
  kMma,
  kLinear,
  kHopper,
  kInt8,
  kCausalLinear,
  kSplit,
  kWeights,
  kDecoding,
  kGivenMaps,
  kStreamedMaps,
};

struct Proof {
  const char* name;       // in IKATTN_KERNELS
  const char* does;       // what its kernels compute
  const char* instead;    // what takes the calls where the family is off
  const char* gpu;        // nullptr: no GPU has run it
  const char* commit;     // the last at which it passed there
  const char* since;      // what has changed since then; "": nothing
  const char* counts_on;  // the GPUs that the entry counts for
};

// Both sources have given the same bits in 126 calls: 16 bits, TF32, float32 and float64, forward
// and backward.
inline constexpr const char* kSameBits = "cut into steps; the same bits in the interpreter";
inline constexpr const char* kSameInstructions = "8.0 and later: same instructions";

// The ledger, in the order of Family.
inline constexpr Proof kLedger[] = {
    {"mma", "attention in 16 bits and TF32 by mma.sync, forward and backward, in quadratic time",
     "CUDA cores", "H100", "167924f", kSameBits, kSameInstructions},
    {"linear", "linear time without causality, sums by mma.sync", "quadratic time", "H100",
     "167924f", kSameBits, kSameInstructions},
    {"hopper", "pairs of heads in the folded form by wgmma, without masks of pairs and dropout",
     "mma", "H200", "c2071f5", kSameBits, "9.0"},
    {"int8", "scores in int8 in the forward of hopper", "hopper in float16", "H200", "c2071f5",
     kSameBits, "9.0"},
    {"causal_linear", "causal calls in linear time", "quadratic time", nullptr, nullptr, "",
     kSameInstructions},
    {"split", "float32 without TF32, as two numbers of float16, by mma.sync", "CUDA cores", nullptr,
     nullptr, "", kSameInstructions},
    {"weights", "spectral_features and implicit_kernel_weights in 16 bits by mma.sync",
     "CUDA cores", nullptr, nullptr, "", kSameInstructions},
    {"decoding", "attention_from_features and KeyFeatures.attend", "torch's operators", nullptr,
     nullptr, "", kSameInstructions},
    {"given_maps", "maps of given weights in float32 and 16 bits, up to 64 heads, by mma.sync",
     "CUDA cores", nullptr, nullptr, "", kSameInstructions},
    {"streamed_maps", "maps from query and key, and their gradients, by mma.sync",
     "torch's operators, in blocks of rows", nullptr, nullptr, "", kSameInstructions},
};
inline constexpr size_t kFamilies = sizeof(kLedger) / sizeof(kLedger[0]);
static_assert(static_cast<size_t>(Family::kStreamedMaps) + 1 == kFamilies);

constexpr const Proof& proof_of(Family family) { return kLedger[static_cast<size_t>(family)]; }
constexpr bool is_proven(Family family) { return proof_of(family).gpu != nullptr; }

}  // namespace ikattn
