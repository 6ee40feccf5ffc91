// Sizes of the tiles and blocks of the CPU kernels, by instruction set. The reasons are in
// docs/internals/cpu_kernels.md, "Sizes".
//
// Another size may change last bits; the number of threads never does.
#pragma once

#include <stdint.h>

namespace ikattn::IKATTN_ISA {
namespace {

// --- Registers: 6 x kStripVectors accumulators, kStripVectors operands, 1 broadcast

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kStripVectors = 4;  // 29 of 32 registers
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kStripVectors = 2;  // 15 of 16 registers
constexpr int kRegisters = 16;
#else
constexpr int kVectorBytes = 16;
constexpr int kStripVectors = 2;
constexpr int kRegisters = 16;
#endif
constexpr int64_t kTileRows = 6;  // of a register tile
constexpr int64_t kPanel = 64;    // columns of a panel (panel_gemm.h): the layout, not a choice

// --- Attention: rows are queries, columns keys

constexpr int64_t kForwardRows = 192;      // of a block of the forward
constexpr int64_t kCausalRows = 64;        // of one that is causal
constexpr int64_t kWeightRows = 48;        // of a block of weights
constexpr int64_t kBackwardRows = 64;      // of a block of the backward
constexpr int64_t kBackwardKeyBlocks = 2;  // 64-key blocks that share one sweep over the queries
constexpr int64_t kSweepKeys = kBackwardKeyBlocks * kPanel;
constexpr int64_t kBandRows = 16;          // where the diagonal crosses a tile
constexpr int64_t kPartBlocks = 16;        // 64-key blocks summed by themselves
constexpr int64_t kFewQueries = 1024;      // whose parts are held at once: no more than their keys
constexpr int64_t kFrequencyTokens = 512;  // whose frequency gradients are summed by themselves
static_assert(kForwardRows % 16 == 0 && kCausalRows % 16 == 0 && kBackwardRows % 16 == 0);

// --- Attention in linear time (moments.h)

constexpr int64_t kMomentTokens = 256;  // summed by themselves
constexpr int64_t kProductRows = 192;   // query rows that read the moments together
constexpr int64_t kProductPanels = 16;  // of entries, whose moments stay in cache for all tokens
static_assert(kForwardRows <= kProductRows);

// --- Attention from existing features (from_features.h)

constexpr int64_t kRowsTogether = 8;     // queries that read a key together
constexpr int64_t kKeysTogether = 1024;  // of a task, summed by themselves

// --- Contributions

constexpr int64_t kPairRows = 32;          // of a block
constexpr int kRowGroup = 4;               // that read a factor together
constexpr int64_t kProductTileRows = 192;  // of a tile of a product (products.h)
constexpr int64_t kProductTileColumns = 256;

}  // namespace
}  // namespace ikattn::IKATTN_ISA
