// Results without pairs: tokens' entries, made in registers, times the moments of others.
#include "attention/cuda/linear/entry_rows.h"

namespace ikattn::cuda {
namespace {

constexpr int kStageRows = 64;  // entries in a stage: those of four a's
constexpr int kPairStages = 4;  // stages of a pair of chunks; as many are in flight
static_assert(kStageRows * kPairStages == kPairEntries);
constexpr uint32_t kEntryStage = kStageRows * kMomentBytes;

// 256 tokens and 64 columns. Moments pass by, those of 64 entries at a time; a warp has 32 tokens,
// and makes of the features of chunk B and one feature of chunk A 16 entries.
template <int F>
__global__ void __launch_bounds__(kEntryThreads, 2)
    entry_kernel(EntryProducts products, FeatureChunks chunks, int slices, uint32_t entry_scale) {
  constexpr uint32_t kTokenTile = kEntryTokens * 2 * F;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const LinearTokens& tokens = products.tokens;
  const int slice = static_cast<int>(blockIdx.x) % slices;
  const EntryBlock at(tokens, blockIdx.x / slices);
  const Prefixes& prefixes = products.sums.prefixes;
  if (is_idle(tokens, prefixes, products.quadratic_blocks, at)) return;  // the whole block

  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  for (int index = threadIdx.x; index < kEntryTokens * (F / 8); index += kEntryThreads) {
    const int row = index / (F / 8), piece = index % (F / 8);
    const bool there = at.first + row < tokens.N && piece / 2 < chunks.count;
    const Half* from = tokens.phi + (at.bh * tokens.N + at.first + row) * chunks.width +
                       (there ? chunks.column(piece / 2) + piece % 2 * 8 : 0);
    cp_async_16(base + swizzled(row, piece, 2 * F), there ? from : tokens.phi, there ? 16 : 0);
  }
  const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
  const Half* moments = products.sums.moments +
                        (place_of_sums(tokens, prefixes, at) * slices + slice) * chunks.pairs() *
                            (kPairEntries * kMomentColumns) +
                        threadIdx.x * 8;
  const uint32_t to = base + kTokenTile + swizzled(row, piece, kMomentBytes);
  int remaining = chunks.pairs() * kPairStages;  // stages to copy
  const auto copy = [&](int stage) {
    if (remaining > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        cp_async_16(to + stage * kEntryStage + half * (kEntryStage / 2),
                    moments + half * (kEntryThreads * 8));
      }
      moments += kStageRows * kMomentColumns;
      --remaining;
    }
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < kPairStages - 1; ++stage) copy(stage);

  const uint32_t own_rows = base + warp * 32 * 2 * F;
  const FragmentAddresses places = FragmentAddresses::of_rows(kTokenTile, kMomentBytes);
  float output[2][kMomentColumns / 8][4] = {};
  for (int chunk_b = 0; chunk_b < chunks.count; ++chunk_b) {
    Fragment b[2];
    for (int chunk_a = 0; chunk_a <= chunk_b; ++chunk_a) {
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        uint32_t a[4];  // features 2t and 2t + 1 of the lane's four tokens
#pragma unroll
        for (int four = 0; four < 2; ++four) {
          const int stage = 2 * eight + four;
          cp_async_wait<kPairStages - 2>();
          __syncthreads();  // the stage is here, the first time the tokens, too
          copy((stage + kPairStages - 1) % kPairStages);
          if (stage == 0 && chunk_a == 0) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              b[m] = load_fragment(own_rows +
                                   swizzled(m * 16 + lane % 16, 2 * chunk_b + lane / 16, 2 * F));
            }
          }
          if (four == 0) {
            ldmatrix_x4(a, own_rows + swizzled(lane, 2 * chunk_a + eight, 2 * F));
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = multiply_f16x2(a[i], entry_scale);
          }
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            // Feature 4 four + r of the eight, which another lane of these tokens has.
            const int from = (lane & ~3) | (2 * four + r / 2);
            Fragment entries[2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const uint32_t scale =
                    twice(__shfl_sync(0xffffffffu, a[2 * m + half], from), r % 2 != 0);
                uint32_t (&registers)[4] = entries[m].registers;
                registers[half] = multiply_f16x2(b[m].registers[half], scale);
                registers[half + 2] = multiply_f16x2(b[m].registers[half + 2], scale);
              }
            }
            multiply_by_rows<Half>(output, entries, [&](int n) {
              return base + stage * kEntryStage + places.at<kMomentBytes>(r, n);
            });
          }
        }
      }
    }
  }
  cp_async_wait<0>();

  store_entries(products, slices, [&](int m, int n, int i) { return output[m][n][i]; });
}

}  // namespace

const char* entry_products(const AttentionParams& params, const EntryProducts& products,
                           Stream stream) {
  const FeatureChunks chunks(params);
  const int F = chunks.columns(), slices = moment_slices(params);
  const LinearTokens& tokens = products.tokens;
  const int64_t blocks = params.B * tokens.heads * ceil_div(tokens.N, kEntryTokens) * slices;
  return launch(F == 64 ? entry_kernel<64> : entry_kernel<128>, dim3(static_cast<unsigned>(blocks)),
                dim3(kEntryThreads), kEntryTokens * 2 * F + kPairStages * kEntryStage, stream,
                products, chunks, slices, twice_half(tokens.entry_scale));
}

}  // namespace ikattn::cuda
