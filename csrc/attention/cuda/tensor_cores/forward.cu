// The forward pass on tensor cores: a block is 128 queries, four warps of 32, and passes along the
// keys, 64 at a time and two tiles in flight. Scores become weights, and weights the operand of the
// product with the value, in registers. The folded form has no maximum and no exponential; in the
// general one neither depends on the scores.
#include "attention/cuda/tensor_cores/epilogue_forward.h"
#include "attention/cuda/tensor_cores/forward_pairs.h"
#include "attention/cuda/tensor_cores/initial_sums.h"
#include "attention/cuda/tensor_cores/tiles.h"

namespace ikattn::cuda {
namespace {

template <int F, int V, Pairs kPairs>
struct Layout {
  static constexpr uint32_t kValues = kStep * 2 * F;  // behind the keys
  static constexpr uint32_t kTerms = kValues + kStep * 2 * V;
  static constexpr uint32_t kStage = kTerms + kStep * 4 * (kPairs == Pairs::kGeneral ? 2 : 1);
  static constexpr int64_t kBytes = kStages * int64_t{kStage};
};

// Loads the sums with which the rows of a warp begin.
template <int V, typename Rows, int kRowTiles>
__device__ __forceinline__ void load_initial_sums(const AttentionParams& params,
                                                  const InitialSums& initial, const QueryBlock& at,
                                                  Rows (&rows)[kRowTiles],
                                                  float (&output)[kRowTiles][V / 8][4]) {
  for_own_rows<kRowTiles>(at.i0, threadIdx.x, [&](int m, int half, int64_t i) {
    if (i >= params.L) return;
    const int64_t row = int64_t{at.bh} * params.L + i;
    if (threadIdx.x % 4 == 0) rows[m].sums[half] = initial.sums[row];  // lanes are added up
    for_pairs<V>([&](int column, int n) {
      const float2 two = load_vector<float2>(initial.output + row * V + column);
      output[m][n][2 * half] = two.x;
      output[m][n][2 * half + 1] = two.y;
    });
  });
}

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_forward_kernel(AttentionParams params, FoldedTokens tokens, Parts parts,
                          InitialSums initial) {
  using L = Layout<F, V, kPairs>;
  constexpr bool kIsGeneral = kPairs == Pairs::kGeneral;
  constexpr int kRowTiles = kRowTilesFor<V>, kQueries = kWarps * kRowTiles * 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int blocks = static_cast<int>(gridDim.x) / parts.count;
  const int part = static_cast<int>(blockIdx.x) / blocks;
  const QueryBlock at(params, kQueries, blockIdx.x % blocks);
  const int i0 = at.i0;
  const uint32_t state = tokens.forms.state[at.bk];
  if (is_of_other_form<kPairs>(state)) return;  // the whole block
  if (kPairs == Pairs::kAll && !is_quadratic(params, tokens, at)) return;

  // 1. The first tile of keys and values is on its way.
  TileRange tiles(params, at, kQueries, part, parts.count);
  const bool goes_on =
      kPairs == Pairs::kCausal && initial.output != nullptr && !is_quadratic(params, tokens, at);
  if (goes_on) tiles.first = initial.first_key(i0) / kStep;
  KeyCopy<L, T, F, V, kIsGeneral ? 2 : 1> copy(params, tokens, at, tiles.first);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  if (tiles.first < tiles.end) {
    copy(shared_address(shared + tiles.first % kStages * L::kStage),
         remaining_of(params.S, tiles.first * int64_t{kStep}));
  }
  const FragmentAddresses key_places = FragmentAddresses::of_columns(0, 2 * F);

  // 2. The warp's queries, all their features, as A fragments.
  Fragment phi_q[kRowTiles][F / 16];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    load_rows<F / 16>(phi_q[m], tokens.phi_q + at.bh * params.L * F, F, F,
                      i0 + (warp * kRowTiles + m) * 16, params.L);
  }
  // 3. Tile by tile: scores, weights, output += weights x values.
  float output[kRowTiles][V / 8][4] = {};
  ForwardRows<T, kPairs> rows[kRowTiles];
  if (goes_on) load_initial_sums<V>(params, initial, at, rows, output);
  const GeneralScales& scales = tokens.forms.general;

  for (int tile = tiles.first; tile < tiles.end; ++tile) {
    Shared<unsigned char> stage =
        arrive_at<L, T, kStep, V>(tile, tiles.end, params.S, state, shared, copy);
    const uint32_t base = shared_address(stage);
    Shared<const float> terms = shared_cast<float>(stage + L::kTerms);
    const int64_t j0 = tile * int64_t{kStep};
    const TileVisibility<kPairs> visible(params, at.b, at.h, i0, j0);
#pragma unroll(kPairs == Pairs::kAll ? 2 : 1)  // all four would spill
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
      float s[kRowTiles][2][4] = {};
      multiply_by_columns<Half, F / 16>(
          s, [&](int m, int k) { return phi_q[m][k]; },
          [&](int k) { return base + key_places.at<2 * F>(chunk, k); });
      const KeyColumns keys = load_keys<kPairs>(terms, chunk);
      Fragment weights[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const FragmentPairs<kPairs> pairs(params, visible, at.bh, i0, j0,
                                          (warp * kRowTiles + m) * 16, chunk * 16);
        weights[m] = rows[m].weigh(s[m], pairs, keys, scales, (state & kFew) != 0, output[m]);
      }
      rejoin_after<kPairs>();
      multiply_by_rows<T>(output, weights, [&](int n) {
        return base + L::kValues + swizzled(chunk * 16 + lane % 16, 2 * n + lane / 16, 2 * V);
      });
    }
  }

  // 4. Rows of the result, or of its part.
  const float output_scale = static_cast<float>(dropout_rescale(params.dropout_threshold)) /
                             value_scale_of(tokens, value_head_of(params, at.b, at.h));
  // Found anew: no register holds the rows over the tiles.
  for_own_rows<kRowTiles>(at.i0, unknown_to_compiler(threadIdx.x), [&](int m, int half, int64_t i) {
    const float sum = sum_of_lanes<4>(rows[m].sums[half]);
    const float rounding = sum_of_lanes<4>(rows[m].roundings[half]);
    if (i >= params.L) return;
    store_row<T, V, kIsGeneral>(params, tokens, parts, part, at, i, 0, sum, rounding,
                                rows[m].reference(half), output_scale,
                                [&](int n, int c) { return output[m][n][2 * half + c]; });
  });
}

// Adds up the parts of a row, always in the same order; a warp per row and V columns.
template <typename T, int V>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    combine_kernel(AttentionParams params, FoldedTokens tokens, Parts parts) {
  const int lane = threadIdx.x % 32;
  const int64_t rows = params.B * params.H * params.L, first = int64_t{blockIdx.y} * V;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;  // the whole warp
  const int64_t bh = row / params.L, bk = key_head_of(params, bh);
  const bool general = (tokens.forms.state[bk] & kGeneral) != 0;
  double largest = minus_infinity<double>();
  for (int part = 0; general && part < parts.count; ++part) {
    largest = fmax(largest, parts.reference[part * rows + row]);
  }
  float sum = 0, rounding = 0, output[V / 32] = {};
  for (int part = 0; part < parts.count; ++part) {
    const int64_t part_row = part * rows + row;
    // Nothing but NaN can be in a part that saw no finite logit.
    const double own = general ? parts.reference[part_row] : largest;
    const float rescale =
        own == minus_infinity<double>() ? 1 : fast_exponential(static_cast<float>(own - largest));
    sum += parts.sums[part_row] * rescale;
    rounding += parts.roundings[part_row] * rescale;
    const float* columns = parts.output + part_row * padded_columns(params.d_v) + first;
#pragma unroll
    for (int n = 0; n < V / 32; ++n) output[n] += columns[n * 32 + lane] * rescale;
  }
  sum = with_poison(tokens, row, sum);
  if (lane == 0 && first == 0) {
    static_cast<double*>(params.log_normalizer.data)[row] =
        log_normalizer_of(sum, general ? reference_of<T, true>(tokens, bk, largest)
                                       : reference_of<T, false>(tokens, bk, largest));
  }
  const int64_t value_head = value_head_of(params, bh / params.H, bh % params.H);
  const float output_scale = static_cast<float>(dropout_rescale(params.dropout_threshold)) /
                             value_scale_of(tokens, value_head);
  const float scale = output_scale / (sum + rounding);  // NaN where the row is
  const Tokens out(params.output, bh / params.H, bh % params.H);
#pragma unroll
  for (int n = 0; n < V / 32; ++n) {
    const int64_t column = first + n * 32 + lane;
    if (column < params.d_v) {
      out.store<float>(row % params.L, column, sum == 0 ? 0.0f : output[n] * scale);
    }
  }
}

}  // namespace

Parts take_parts(const AttentionParams& params, const DeviceExecutor& executor, int count) {
  const int64_t rows = params.B * params.H * params.L;
  Parts parts;
  parts.count = count;
  if (parts.count > 1) {
    parts.output = executor.take<float>(parts.count * rows * padded_columns(params.d_v));
    parts.sums = executor.take<float>(parts.count * rows);
    parts.roundings = executor.take<float>(parts.count * rows);
    parts.reference = executor.take<double>(parts.count * rows);
  }
  return parts;
}

const char* combine_parts(const AttentionParams& params, Stream stream, const FoldedTokens& tokens,
                          const Parts& parts) {
  if (parts.count == 1) return nullptr;
  const int64_t columns = padded_columns(params.d_v), V = columns == 64 ? 64 : 128;
  const dim3 blocks(static_cast<unsigned>(ceil_div(params.B * params.H * params.L, kWarps)),
                    static_cast<unsigned>(columns / V));
  return launch_type(params, [&]<typename T>() {
    return launch(V == 64 ? combine_kernel<T, 64> : combine_kernel<T, 128>, blocks,
                  dim3(kFoldedThreads), 0, stream, params, tokens, parts);
  });
}

const char* folded_forward(const AttentionParams& params, Stream stream, const FoldedTokens& tokens,
                           const Parts& parts, const InitialSums& initial, bool general_alone) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const int64_t blocks =
        params.B * params.H * ceil_div(params.L, int64_t{kWarps} * kRowTilesFor<V> * 16);
    return launch_forms(params, [&]<Pairs kPairs>() -> const char* {
      if (kPairs != Pairs::kGeneral && general_alone) return nullptr;
      return launch(folded_forward_kernel<T, F, V, kPairs>,
                    dim3(static_cast<unsigned>(blocks * parts.count)), dim3(kFoldedThreads),
                    Layout<F, V, kPairs>::kBytes, stream, params, tokens, parts, initial);
    });
  });
}

}  // namespace ikattn::cuda
