// The key side of the folded form's backward on Hopper: grad_phi_k, grad_value and the gradients of
// the logits. A block owns 128 keys, two warpgroups of 64, and passes along the queries of all
// heads that share them, 64 at a time. Rows are keys: S^T = phi_k' phi_q^T and dP^T = V dO^T, so
// that what is made of them is the A of what is summed.
//
// Compiled for sm_90a alone.
#include "attention/cuda/folded_gradients.h"
#include "attention/cuda/warpgroup_tiles.h"

namespace ikattn::cuda {
namespace {

template <int F, int V>
struct KeyLayout {
  using Queries = Boxes<kStep, F>;
  using Gradients = Boxes<kStep, V>;
  static constexpr uint32_t kGradients = Queries::kBytes;
  static constexpr uint32_t kStage = kGradients + Gradients::kBytes;
  // The block's own keys, and its values where the registers do not hold them.
  using OwnKeys = Boxes<kWarpgroupRows, F>;
  using OwnValues = Boxes<kWarpgroupRows, V>;
  static constexpr bool kHoldsValues = V <= 64;
  static constexpr uint32_t kOwnKeys = kTilesInFlight * kStage;
  static constexpr uint32_t kOwnValues = kOwnKeys + OwnKeys::kBytes;
  // [stage][2][kStep], deltas behind normalizers
  static constexpr uint32_t kNormalizers = kOwnValues + (kHoldsValues ? 0 : OwnValues::kBytes);
  static constexpr int64_t kBytes = kNormalizers + kTilesInFlight * 2 * kStep * int64_t{4};
};

template <typename T, int F, int V, bool kCausal>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_key_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                         const float* logits, PairGradients<float> gradients) {
#if IKATTN_WARPGROUP_CODE
  using L = KeyLayout<F, V>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t key_blocks = (params.S + kWarpgroupRows - 1) / kWarpgroupRows;
  // The first keys first: under causality they have the most to do.
  const int64_t bk = blockIdx.x / key_blocks, j0 = blockIdx.x % key_blocks * kWarpgroupRows;
  const int64_t b = bk / params.key_heads, key_head = bk % params.key_heads;
  const int64_t group = params.H / params.key_heads;
  if (is_of_other_form<Pairs::kAll>(tokens.state[bk])) return;  // the whole block

  const int64_t padded = padded_tokens(params.L);
  // `step` counts the tiles of one head after those of another.
  const int64_t first_head = b * params.H + key_head * group;
  const int first_tile = kCausal ? static_cast<int>(min(j0, padded) / kStep) : 0;
  const int tiles = static_cast<int>(padded / kStep) - first_tile;
  const int steps = tiles * static_cast<int>(group);
  const auto first_query = [&](int step) { return int64_t{first_tile + step % tiles} * kStep; };
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const auto begin_copy = [&](int step) {
    const int64_t bh = first_head + step / tiles, i0 = first_query(step);
    const int64_t row = bh * params.L + i0;
    const int stage = step % kTilesInFlight, count = left_of(params.L, i0);
    const uint32_t place = base + stage * L::kStage;
    const uint32_t numbers = base + L::kNormalizers + stage * 2 * kStep * 4;
    L::Queries::copy(place, tokens.phi_q + row * F, F, F, count);
    L::Gradients::copy(place + L::kGradients, static_cast<const T*>(rows.gradients) + row * V, V, V,
                       count);
    copy_numbers<kStep>(numbers, rows.normalizer + bh * padded, i0, padded);
    copy_numbers<kStep>(numbers + kStep * 4, rows.delta + bh * padded, i0, padded, 32);
    cp_async_commit();
  };
  const int64_t stride = tokens.value.stride[2];
  const T* values = value_rows<T>(params, tokens, b, key_head * group) + j0 * stride;
  if (steps > 0) {
    const int count = left_of(params.S, j0);
    L::OwnKeys::copy(base + L::kOwnKeys, tokens.phi_k + (bk * params.S + j0) * F, F, F, count);
    if constexpr (!L::kHoldsValues) {
      L::OwnValues::copy(base + L::kOwnValues, values, stride, tokens.value_columns, count);
    }
    begin_copy(0);
  }
  // Those of the thread's warpgroup.
  const uint32_t warpgroup = __shfl_sync(0xffffffffu, warp / 4, 0);  // known to be the warp's
  const uint32_t own_keys = base + L::kOwnKeys + warpgroup * (64 * 128);
  [[maybe_unused]] const uint32_t own_values = base + L::kOwnValues + warpgroup * (64 * 128);

  const int64_t value_head = value_head_of(params, b, key_head * group);
  const float fit = fit_of_keys(tokens, rows, bk, value_head);
  const float four_m = static_cast<float>(4 * params.M);
  const int64_t row0 = j0 + warp * 16 + g;  // a key
  const bool there[2] = {row0 < params.S, row0 + 8 < params.S};
  [[maybe_unused]] uint32_t held_values[V / 16][4];
  if constexpr (L::kHoldsValues) {
    load_left<V>(held_values, values + (row0 - j0) * stride, stride, there, tokens.value_columns);
  }
  float key_fit[2], key_terms[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = row0 + 8 * half;
    // sqrt(K e_j), with which the score is bounded.
    const float scale = there[half] ? tokens.scales[bk * params.S + j] * four_m : 0.0f;
    key_fit[half] = scale * fit * (1 / kWeightScale<T>);
    key_terms[half] = there[half] ? tokens.terms[bk * padded_tokens(params.S) + j] : 0.0f;
  }
  float s[kStep / 2], x[kStep / 2];
  uint32_t weights[kStep / 16][4], products[kStep / 16][4];
  float key_sums[F / kBoxColumns][32] = {}, value_sums[V / kBoxColumns][32] = {};
  float logit_sums[2] = {};

  for (int step = 0; step < steps; ++step) {
    const int stage = step % kTilesInFlight;
    const uint32_t place = base + stage * L::kStage;
    wait_for_tile();
    Shared<const float> normalizers =
        shared_cast<float>(shared + (L::kNormalizers + stage * 2 * kStep * 4));
    Shared<const float> deltas = normalizers + kStep;
    wgmma_fence();
    begin_by_columns<Half, typename L::OwnKeys, typename L::Queries>(s, own_keys, place);
    if constexpr (L::kHoldsValues) {
      begin_by_columns<T, kStep, V>(x, held_values, place + L::kGradients);
    } else {
      begin_by_columns<T, typename L::OwnValues, typename L::Gradients>(x, own_values,
                                                                        place + L::kGradients);
    }
    wgmma_commit();
    if (step + 1 < steps) begin_copy(step + 1);
    wgmma_wait<0>();
    // The query that is the first to see this thread's first key.
    const int64_t far = row0 - first_query(step);
    const int diagonal = kCausal ? static_cast<int>(max(far, int64_t{-kStep})) : 0;
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n) {
      const float2 pair = load_vector<float2>(normalizers + n * 8 + 2 * t);
      const float2 delta = load_vector<float2>(deltas + n * 8 + 2 * t);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = 4 * n + c, column = n * 8 + 2 * t + c % 2;
        float inverse = (c % 2 == 0 ? pair.x : pair.y) * kWeightScale<T>;
        if (kCausal && diagonal + 8 * (c / 2) > column) inverse = 0;
        // 0 where it is not seen, whatever the key holds.
        const float similarity = inverse == 0 ? 0 : s[i] * s[i] + key_terms[c / 2];
        const float scaled = inverse == 0 ? 0 : inverse * (x[i] - (c % 2 == 0 ? delta.x : delta.y));
        logit_sums[c / 2] += similarity * scaled;
        s[i] *= key_fit[c / 2] * scaled;
        x[i] = similarity * inverse;
      }
    }
    pack_left<T, kStep / 8>(x, weights);
    pack_left<Half, kStep / 8>(s, products);
    wgmma_fence();
    begin_by_rows<T, kStep, V>(value_sums, weights, place + L::kGradients);
    begin_by_rows<Half, kStep, F>(key_sums, products, place);
    wgmma_commit();
    wgmma_wait<0>();
  }

  store_key_gradients<T, F, V>(
      params, tokens, rows, logits, gradients, bk, value_head, row0, fit, logit_sums,
      [&](int half, int n, int c) { return sum_at(key_sums, half, n, c); },
      [&](int half, int n, int c) { return sum_at(value_sums, half, n, c); });
#else
  (void)params;
  (void)tokens;
  (void)rows;
  (void)logits;
  (void)gradients;
  __trap();
#endif
}

}  // namespace

const char* warpgroup_key_gradients(const AttentionBackwardParams& params, Stream stream,
                                    const FoldedTokens& tokens, const FoldedRows& rows,
                                    const float* logits, const PairGradients<float>& gradients) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const int64_t blocks = params.B * params.key_heads * ceil_div(params.S, kWarpgroupRows);
    const auto queue = [&](auto kernel) {
      return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarpgroupThreads),
                    KeyLayout<F, V>::kBytes, stream, params, tokens, rows, logits, gradients);
    };
    return params.is_causal ? queue(warpgroup_key_kernel<T, F, V, true>)
                            : queue(warpgroup_key_kernel<T, F, V, false>);
  });
}

}  // namespace ikattn::cuda
