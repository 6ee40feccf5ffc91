// Tokens that meet no others: their entries, made in registers, times the moments of these.
#include "attention/cuda/linear/linear.h"
#include "attention/cuda/tensor_cores/blocks.h"

namespace ikattn::cuda {
namespace {

constexpr int kStageRows = 64;  // entries in a stage: those of four a's
constexpr int kPairStages = 4;  // of a pair of chunks; and as many are in flight
static_assert(kStageRows * kPairStages == kPairEntries);
constexpr uint32_t kMomentBytes = 2 * kMomentColumns;
constexpr uint32_t kEntryStage = kStageRows * kMomentBytes;

// One of a register's two numbers, twice.
__device__ __forceinline__ uint32_t twice(uint32_t two, bool second) {
  return second ? (two >> 16) | (two & 0xffff0000u) : (two & 0xffffu) | (two << 16);
}

// The rows of a warp, of what their entries have added up to.
__device__ __forceinline__ void store_entries(const EntryProducts& products, int slices,
                                              const float (&output)[2][kMomentColumns / 8][4]) {
  // Found anew: no register holds them over the stages.
  const unsigned thread = unknown_to_compiler(threadIdx.x);
  const unsigned index = unknown_to_compiler(blockIdx.x);
  const LinearTokens& tokens = products.tokens;
  const int slice = static_cast<int>(index) % slices, warp_row = static_cast<int>(thread) / 32 * 32;
  const EntryBlock at(tokens, index / slices);
  if (are_by_pairs(tokens, products.quadratic_blocks, at,
                   warp_row / kLinearQueries * kLinearQueries)) {
    return;
  }
  const int64_t bk = at.bh / tokens.group, b = at.bh / tokens.heads, h = at.bh % tokens.heads;
  const int64_t place = place_of_sums(tokens, products.sums.prefixes, at);
  const LinearHead head = products.sums.heads[place];
  const float* center =
      products.sums.centers + (place * slices + slice) * kMomentColumns + thread % 4 * 2;
  const int64_t* stride = products.output.stride;
  const RowPairs pairs(products.output);
  const float units = products.units == nullptr ? 1.0f : 1 / products.units[bk];
  const float unit = head.moment_unit / tokens.entry_scale;
  const float row_unit = products.in_row_units ? 1.0f : head.row_unit;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = at.first + warp_row + m * 16 + thread % 32 / 4 + 8 * half;
      if (i >= tokens.N) continue;
      const bool is_hidden = products.logits != nullptr &&
                             products.logits[at.bh * tokens.N + i] == minus_infinity<float>();
      // The units of rows come last: values may be large where their scales are small.
      float of_center = 1, of_product = unit;
      if (products.goes_on) {
        of_center = products.weights[at.bh * tokens.N + i];
      } else if (products.weights != nullptr) {
        of_product /= products.weights[at.bh * tokens.N + i];
      } else {
        of_center *= tokens.terms[at.bh * padded_tokens(tokens.N) + i] * units;
        of_product *= units;
      }
      of_center *= row_unit;
      of_product *= row_unit;
      pairs.store<kMomentColumns>(
          b * stride[0] + h * stride[1] + i * stride[2], slice * kMomentColumns, products.columns,
          [&](int n) {
            const float2 own = load_vector<float2>(center + n * 8);
            if (is_hidden) return make_float2(0, 0);
            return make_float2(own.x * of_center + output[m][n][2 * half] * of_product,
                               own.y * of_center + output[m][n][2 * half + 1] * of_product);
          });
    }
  }
}

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
  const FragmentPlaces places = FragmentPlaces::of_rows(kTokenTile, kMomentBytes);
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

  store_entries(products, slices, output);
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
