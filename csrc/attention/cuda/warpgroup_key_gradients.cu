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
  static constexpr uint32_t kBarriers = kNormalizers + kTilesInFlight * 2 * kStep * 4;
  static constexpr uint32_t kScales = kBarriers + 64;  // KeyScales
  static_assert(TileBarriers::kBytes <= 64);
  static constexpr int64_t kBytes = kScales + sizeof(KeyScales);
};

// From where a block's own tokens, and the tiles it passes along, are copied.
struct PairMaps {
  KeyMaps own;
  RowMap queries, gradients;
};

// What the third warpgroup of a block does: copies the block's own tokens, which barriers.other()
// waits for, and the tiles.
template <typename L>
__device__ __forceinline__ void copy_pairs(const AttentionBackwardParams& params,
                                           const FoldedRows& rows, const PairMaps& maps,
                                           const KeyBlock& at, const TileBarriers& barriers,
                                           uint32_t base) {
  if (threadIdx.x == kProductThreads && at.steps > 0) {
    const uint32_t barrier = barriers.other();
    barrier_arrive(barrier, L::OwnKeys::kBytes + (L::kHoldsValues ? 0 : L::OwnValues::kBytes));
    L::OwnKeys::copy(base + L::kOwnKeys, maps.own.keys, at.b, at.key_head, at.j0, barrier);
    if constexpr (!L::kHoldsValues) {
      L::OwnValues::copy(base + L::kOwnValues, maps.own.values, at.b, at.value_head, at.j0,
                         barrier);
    }
  }
  constexpr uint32_t kNumbers = kStep * 4, kCopied = L::kStage + 2 * kNumbers;
  const int64_t padded = padded_tokens(params.L);
  int head = at.key_head * at.group, i0 = at.first_tile * kStep;
  copy_tiles(barriers, at.steps, kCopied, [&](int, int stage, uint32_t barrier) {
    const int64_t first = (at.b * params.H + head) * padded + i0;
    const uint32_t place = base + stage * L::kStage;
    const uint32_t numbers = base + L::kNormalizers + stage * 2 * kNumbers;
    L::Queries::copy(place, maps.queries, at.b, head, i0, barrier);
    L::Gradients::copy(place + L::kGradients, maps.gradients, at.b, head, i0, barrier);
    begin_bytes(numbers, rows.normalizer + first, kNumbers, barrier);
    begin_bytes(numbers + kNumbers, rows.delta + first, kNumbers, barrier);
    i0 += kStep;
    if (i0 < params.L) return;
    i0 = at.first_tile * kStep;
    ++head;
  });
}

template <typename T, int F, int V, bool kCausal>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_key_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                         const float* logits, PairGradients<float> gradients,
                         const __grid_constant__ PairMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = KeyLayout<F, V>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const KeyBlock at(params, kWarpgroupRows, kCausal);
  const int b = at.b, steps = at.steps;
  if (is_of_other_form<Pairs::kAll>(tokens.state[at.bk])) return;  // the whole block

  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  // Where they take no registers from the sums.
  Shared<float> scales = shared_cast<float>(shared + L::kScales);
  if (threadIdx.x == 0) {
    const KeyScales own =
        key_scales_of<T>(params, tokens, rows, at.bk, b * params.G + at.value_head);
    store_vector(scales, make_float4(own.fit, own.features, own.logit, own.value));
  }
  const TileBarriers barriers(base + L::kBarriers, 1);
  if (threadIdx.x >= kProductThreads) {
    copy_pairs<L>(params, rows, maps, at, barriers, base);
    return;
  }
  take_registers<kProductRegisters>();

  // Those of the thread's warpgroup.
  const uint32_t warpgroup = __shfl_sync(0xffffffffu, warp / 4, 0);  // known to be the warp's
  const uint32_t own_keys = base + L::kOwnKeys + warpgroup * (64 * 128);
  [[maybe_unused]] const uint32_t own_values = base + L::kOwnValues + warpgroup * (64 * 128);

  const float four_m = static_cast<float>(4 * params.M);
  const int row0 = at.j0 + warp * 16 + g;  // a key
  const bool there[2] = {row0 < params.S, row0 + 8 < params.S};
  [[maybe_unused]] uint32_t held_values[V / 16][4];
  if constexpr (L::kHoldsValues) {
    const int64_t (&stride)[4] = tokens.value.stride;
    const T* values = static_cast<const T*>(tokens.value.data) + b * stride[0] +
                      at.value_head * stride[1] + row0 * stride[2];
    load_left<V>(held_values, values, stride[2], there, tokens.value_columns);
  }
  float key_fit[2], key_terms[2];
  const float fit = scales[0];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = row0 + 8 * half;
    // sqrt(K e_j), with which the score is bounded.
    const float scale = there[half] ? tokens.scales[at.bk * params.S + j] * four_m : 0.0f;
    key_fit[half] = scale * fit * (1 / kWeightScale<T>);
    key_terms[half] = there[half] ? tokens.terms[at.bk * padded_tokens(params.S) + j] : 0.0f;
  }
  // Whether a tile's sums go on while those of the next are made: wider ones leave no registers.
  constexpr bool kOverlaps = F + V <= 192;
  float s[kStep / 2], x[kStep / 2];
  uint32_t weights[kStep / 16][4], products[kStep / 16][4];
  float key_sums[F / kBoxColumns][32] = {}, value_sums[V / kBoxColumns][32] = {};
  float logit_sums[2] = {};

  const auto begin_sums = [&](int stage) {
    const uint32_t place = base + stage * L::kStage;
    wgmma_fence();
    begin_by_rows<T, kStep, V>(value_sums, weights, place + L::kGradients);
    begin_by_rows<Half, kStep, F>(key_sums, products, place);
    wgmma_commit();
  };

  if (steps > 0) barrier_wait(barriers.other(), 0);
  // The query of a tile that is the first to see this thread's first key.
  [[maybe_unused]] int diagonal = warp * 16 + g;
  TileStage stage;
  int before = 0;  // the stage of the tile before
  for (int step = 0; step < steps; ++step, stage.next()) {
    const uint32_t place = base + stage.index * L::kStage;
    barriers.wait(stage);
    Shared<const float> normalizers =
        shared_cast<float>(shared + (L::kNormalizers + stage.index * 2 * kStep * 4));
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
    if (kOverlaps && step > 0) {
      begin_sums(before);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
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
    if constexpr (kOverlaps) {
      wgmma_wait<0>();
      if (step > 0) barriers.release(before);
    }
    pack_left<T, kStep / 8>(x, weights);
    pack_left<Half, kStep / 8>(s, products);
    before = stage.index;
    if constexpr (!kOverlaps) {
      begin_sums(before);
      wgmma_wait<0>();
      barriers.release(before);
    }
    if constexpr (kCausal) {
      diagonal = (step + 1) % at.tiles == 0 ? warp * 16 + g : diagonal - kStep;
    }
  }

  if (kOverlaps && steps > 0) {
    begin_sums(before);
    wgmma_wait<0>();
  }

  const float4 kept = load_vector<float4>(scales);
  store_key_gradients<F, V>(
      params, logits, gradients, {kept.x, kept.y, kept.z, kept.w}, b, at.key_head, row0, logit_sums,
      [&](int half, int n, int c) { return sum_at(key_sums, half, n, c); },
      [&](int half, int n, int c) { return sum_at(value_sums, half, n, c); });
#else
  (void)params;
  (void)tokens;
  (void)rows;
  (void)logits;
  (void)gradients;
  (void)maps;
  __trap();
#endif
}

}  // namespace

const char* warpgroup_key_gradients(const AttentionBackwardParams& params, Stream stream,
                                    const FoldedTokens& tokens, const FoldedRows& rows,
                                    const float* logits, const PairGradients<float>& gradients) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const int64_t blocks = params.B * params.key_heads * ceil_div(params.S, kWarpgroupRows);
    PairMaps maps;
    const char* error = map_keys<F, kWarpgroupRows>(maps.own, params, tokens);
    if (error == nullptr) {
      error = map_features<F, kStep>(maps.queries, tokens.phi_q, params.B, params.H, params.L);
    }
    if (error == nullptr) {
      error = map_features<V, kStep>(maps.gradients, static_cast<const Half*>(rows.gradients),
                                     params.B, params.H, params.L);
    }
    if (error != nullptr) return error;
    const auto queue = [&](auto kernel) {
      return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarpgroupThreads),
                    KeyLayout<F, V>::kBytes, stream, params, tokens, rows, logits, gradients, maps);
    };
    return params.is_causal ? queue(warpgroup_key_kernel<T, F, V, true>)
                            : queue(warpgroup_key_kernel<T, F, V, false>);
  });
}

}  // namespace ikattn::cuda
