// Queries without pairs: the sums of their weights, and whether these keep their digits; then their
// entries, made in registers, times the moments of the keys.
#include "attention/cuda/folded_forward.h"
#include "attention/cuda/linear_time.h"

namespace ikattn::cuda {
namespace {

constexpr int kEntryThreads = 256, kEntryWarps = kEntryThreads / 32;
constexpr int kEntryQueries = kEntryWarps * 32;
constexpr int kStageRows = 64;  // entries in a stage: those of four a's
constexpr int kPairStages = 4;  // of a pair of chunks; and as many are in flight
static_assert(kStageRows * kPairStages == kPairEntries);
constexpr uint32_t kMomentBytes = 2 * kMomentColumns;
constexpr uint32_t kEntryStage = kStageRows * kMomentBytes;

// 128 queries: sums [B, H, L] of weights, and their logs. A block of which a query's are small
// against the mean of random directions goes by pairs.
template <int F>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    weight_sum_kernel(AttentionParams params, FoldedTokens tokens, FeatureChunks chunks,
                      LinearKeys keys, float share_of_mean, float* sums, uint32_t* by_pairs) {
  constexpr uint32_t kGram = F * 2 * F;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const QueryBlock at(params, kLinearQueries, blockIdx.x);
  const int blocks = static_cast<int>((params.L + kLinearQueries - 1) / kLinearQueries);
  uint32_t* flag = by_pairs + at.bh * blocks + at.i0 / kLinearQueries;
  if (leaves_to_pairs(tokens.state[at.bk])) {  // the whole block
    if (threadIdx.x == 0) *flag = 1;
    return;
  }
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const Half* gram = keys.gram + at.bk * int64_t{2 * F * F};
  for (int index = threadIdx.x; index < 2 * F * (F / 8); index += kFoldedThreads) {
    const int row = index / (F / 8), piece = index % (F / 8);  // rows of both numbers
    cp_async_16(base + swizzled(row, piece, 2 * F), gram + row * F + piece * 8);
  }
  cp_async_commit();

  Fragment phi[2][F / 16];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = at.i0 + (warp * 2 + m) * 16 + g + 8 * half;
      const Half* row = tokens.phi_q + (at.bh * params.L + i) * chunks.width + 2 * t;
#pragma unroll
      for (int k = 0; k < F / 16; ++k) {
        const bool there = i < params.L && k < chunks.count;
        const Half* from = row + (there ? chunks.column(k) : 0);
        phi[m][k].registers[half] = there ? load_vector<uint32_t>(from) : 0;
        phi[m][k].registers[half + 2] = there ? load_vector<uint32_t>(from + 8) : 0;
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  float weights[2][2] = {}, squares[2][2] = {};
  const FragmentPlaces places = FragmentPlaces::of_columns(base, 2 * F);
#pragma unroll
  for (int k = 0; k < F / 16; ++k) {
    float products[2][2][4] = {};
#pragma unroll
    for (int number = 1; number >= 0; --number) {  // the small one first
      multiply_by_columns<Half, F / 16>(
          products, [&](int m, int inner) { return phi[m][inner]; },
          [&](int inner) { return number * kGram + places.at<2 * F>(k, inner); });
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 own = unpack<Half>(phi[m][k].registers[i]);
        const float (&row)[4] = products[m][i / 2];
        weights[m][i % 2] += own.x * row[i % 2 * 2] + own.y * row[i % 2 * 2 + 1];
        squares[m][i % 2] += own.x * own.x + own.y * own.y;
      }
    }
  }

  const LinearHead head = keys.heads[at.bk];
  const float mean = share_of_mean * head.squares / static_cast<float>(2 * params.M);
  bool errs = false;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights[m][half] = sum_of_lanes<4>(weights[m][half]) * head.gram_unit;
      const float square = sum_of_lanes<4>(squares[m][half]);
      const bool there = at.i0 + (warp * 2 + m) * 16 + g + 8 * half < params.L;
      const bool keeps_digits =
          weights[m][half] >= mean * square && weights[m][half] + head.eps_terms > 0;
      errs = errs || (there && !keeps_digits);
    }
  }
  const bool goes_by_pairs = __syncthreads_or(errs) != 0;
  if (threadIdx.x == 0) *flag = goes_by_pairs;
  if (goes_by_pairs || t != 0) return;
  const double reference = reference_of<Half, false>(tokens, at.bk, 0);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = at.i0 + (warp * 2 + m) * 16 + g + 8 * half;
      if (i >= params.L) continue;
      const int64_t row = int64_t{at.bh} * params.L + i;
      const float sum = with_poison(tokens, row, weights[m][half] + head.eps_terms);
      sums[row] = sum;
      static_cast<double*>(params.log_normalizer.data)[row] = log_normalizer_of(sum, reference);
    }
  }
}

// One of a register's two numbers, twice.
__device__ __forceinline__ uint32_t twice(uint32_t two, bool second) {
  return second ? (two >> 16) | (two & 0xffff0000u) : (two & 0xffffu) | (two << 16);
}

// Which queries a block has, which columns of the value, and whether pairs have them.
struct EntryBlock {
  int slice, warp;
  QueryBlock at;
  const uint32_t* by_pairs;  // of the first 128 of the 256 queries
  int second;                // where that of the others is; 0: there are no others

  __device__ __forceinline__ EntryBlock(const AttentionParams& params, const FoldedTokens& tokens,
                                        int slices, unsigned index, unsigned thread)
      : slice(static_cast<int>(index) % slices),
        warp(static_cast<int>(thread) / 32),
        at(params, kEntryQueries, index / slices) {
    const int blocks = static_cast<int>((params.L + kLinearQueries - 1) / kLinearQueries);
    const int first = at.i0 / kLinearQueries;
    by_pairs = tokens.by_pairs + int64_t{at.bh} * blocks + first;
    second = first + 1 < blocks ? 1 : 0;
  }
  __device__ __forceinline__ bool leaves_all() const {
    return by_pairs[0] != 0 && by_pairs[second] != 0;
  }
  __device__ __forceinline__ bool leaves_warp() const {
    return by_pairs[warp < kEntryWarps / 2 ? 0 : second] != 0;
  }
};

// The rows of a warp, of what their entries have added up to.
__device__ __forceinline__ void store_entries(const AttentionParams& params,
                                              const FoldedTokens& tokens, const LinearKeys& keys,
                                              int slices, const float* sums,
                                              const float (&output)[2][kMomentColumns / 8][4]) {
  // Found anew: no register holds them over the stages.
  const unsigned thread = unknown_to_compiler(threadIdx.x);
  const EntryBlock block(params, tokens, slices, unknown_to_compiler(blockIdx.x), thread);
  if (block.leaves_warp()) return;
  const QueryBlock& at = block.at;
  const LinearHead head = keys.heads[at.bk];
  const float* center =
      keys.centers + (int64_t{at.bk} * slices + block.slice) * kMomentColumns + thread % 4 * 2;
  const int64_t* stride = params.output.stride;
  const RowPairs pairs(params.output);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = at.i0 + block.warp * 32 + m * 16 + thread % 32 / 4 + 8 * half;
      if (i >= params.L) continue;
      const float scale = head.moment_unit / sums[at.bh * params.L + i];
      pairs.store<kMomentColumns>(
          at.b * stride[0] + at.h * stride[1] + i * stride[2], block.slice * kMomentColumns,
          params.d_v, [&](int n) {
            const float2 mean = load_vector<float2>(center + n * 8);
            return make_float2(mean.x * head.value_unit + output[m][n][2 * half] * scale,
                               mean.y * head.value_unit + output[m][n][2 * half + 1] * scale);
          });
    }
  }
}

// 256 queries and 64 columns of their output. Moments pass by, those of 64 entries at a time; a
// warp has 32 queries, and makes of the features of chunk B and one feature of chunk A 16 entries.
template <int F>
__global__ void __launch_bounds__(kEntryThreads, 2)
    entry_kernel(AttentionParams params, FoldedTokens tokens, FeatureChunks chunks, LinearKeys keys,
                 int slices, const float* sums) {
  constexpr uint32_t kQueryTile = kEntryQueries * 2 * F;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const EntryBlock block(params, tokens, slices, blockIdx.x, threadIdx.x);
  if (block.leaves_all()) return;  // the whole block
  const QueryBlock& at = block.at;
  const int slice = block.slice;

  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  for (int index = threadIdx.x; index < kEntryQueries * (F / 8); index += kEntryThreads) {
    const int row = index / (F / 8), piece = index % (F / 8);
    const bool there = at.i0 + row < params.L && piece / 2 < chunks.count;
    const Half* from = tokens.phi_q + (at.bh * params.L + at.i0 + row) * chunks.width +
                       (there ? chunks.column(piece / 2) + piece % 2 * 8 : 0);
    cp_async_16(base + swizzled(row, piece, 2 * F), there ? from : tokens.phi_q, there ? 16 : 0);
  }
  const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
  const Half* moments =
      keys.moments +
      (at.bk * int64_t{slices} + slice) * chunks.pairs() * (kPairEntries * kMomentColumns) +
      threadIdx.x * 8;
  const uint32_t to = base + kQueryTile + swizzled(row, piece, kMomentBytes);
  int left = chunks.pairs() * kPairStages;  // stages to copy
  const auto copy = [&](int stage) {
    if (left > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        cp_async_16(to + stage * kEntryStage + half * (kEntryStage / 2),
                    moments + half * (kEntryThreads * 8));
      }
      moments += kStageRows * kMomentColumns;
      --left;
    }
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < kPairStages - 1; ++stage) copy(stage);

  const uint32_t own_rows = base + warp * 32 * 2 * F;
  const FragmentPlaces places = FragmentPlaces::of_rows(kQueryTile, kMomentBytes);
  float output[2][kMomentColumns / 8][4] = {};
  for (int chunk_b = 0; chunk_b < chunks.count; ++chunk_b) {
    Fragment b[2];
    for (int chunk_a = 0; chunk_a <= chunk_b; ++chunk_a) {
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        uint32_t a[4];  // features 2t and 2t + 1 of the lane's four queries
#pragma unroll
        for (int four = 0; four < 2; ++four) {
          const int stage = 2 * eight + four;
          cp_async_wait<kPairStages - 2>();
          __syncthreads();  // the stage is here, the first time the queries, too
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
          }
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            // Feature 4 four + r of the eight, which another lane of these queries has.
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

  store_entries(params, tokens, keys, slices, sums, output);
}

}  // namespace

const char* linear_forward(const AttentionParams& params, const DeviceExecutor& executor,
                           FoldedTokens& tokens) {
  LinearKeys keys;
  if (const char* error = linear_keys(params, executor, tokens, keys)) return error;
  const FeatureChunks chunks(params);
  const int F = chunks.columns(), slices = moment_slices(params);
  const int64_t heads = params.B * params.H, blocks = heads * ceil_div(params.L, kLinearQueries);
  float* sums = executor.take<float>(heads * params.L);
  uint32_t* by_pairs = executor.take<uint32_t>(blocks);
  tokens.by_pairs = by_pairs;
  // Weights of bfloat16, with 8 bits, err as these do where a quarter of that is left.
  const float share_of_mean = params.value.type == ElementType::kBFloat16 ? 0.0625f : 0.25f;
  if (const char* error =
          launch(F == 64 ? weight_sum_kernel<64> : weight_sum_kernel<128>,
                 dim3(static_cast<unsigned>(blocks)), dim3(kFoldedThreads), 4 * F * F,
                 executor.stream, params, tokens, chunks, keys, share_of_mean, sums, by_pairs)) {
    return error;
  }
  const int64_t of_entries = heads * ceil_div(params.L, kEntryQueries) * slices;
  return launch(F == 64 ? entry_kernel<64> : entry_kernel<128>,
                dim3(static_cast<unsigned>(of_entries)), dim3(kEntryThreads),
                kEntryQueries * 2 * F + kPairStages * kEntryStage, executor.stream, params, tokens,
                chunks, keys, slices, sums);
}

}  // namespace ikattn::cuda
