// Gradients of features on Hopper: as gradients.cu has them, with products by wgmma. The features
// of a warp's 32 tokens are two operands in registers, and the moments of one feature after the
// other are copied by TMA. What 16 of the tokens are multiplied with meets their own rows while the
// tensor cores are at the other 16.
//
// Compiled for sm_90a alone.
#include "attention/cuda/hopper/pipeline.h"
#include "attention/cuda/linear/gradient_rows.h"

namespace ikattn::cuda {
namespace {

constexpr int kSquareStages = 6;
static_assert(kEntryWarps == kProductThreads / 32);

// kChunks: of features.
template <int kChunks>
struct GradientLayout {
  static constexpr int kRows = kChunks * kChunk;
  using Squares = Boxes<kRows, kMomentColumns>;
  using Barriers = TileBarriers<1, kSquareStages>;
  static constexpr uint32_t kStage = Squares::kBytes;
  static constexpr uint32_t kDots = kSquareStages * kStage;
  static constexpr uint32_t kFits = kDots + kEntryWarps * kDotBytes;
  static constexpr uint32_t kBarriers = kFits + kEntryWarps * kFitBytes;
  static constexpr int64_t kBytes = kBarriers + Barriers::kBytes;
};

// By one thread: the moments of all features, one feature's after the other's.
template <int kChunks>
__device__ __forceinline__ void copy_squares(
    const typename GradientLayout<kChunks>::Barriers& barriers, uint32_t base, const RowMap& map,
    int bk) {
  using L = GradientLayout<kChunks>;
  TileStageOf<kSquareStages> stage;
#pragma unroll 1
  for (int a = 0; a < L::kRows; ++a, stage.next()) {
    const uint32_t barrier = barriers.full(stage.index);
    barrier_wait(barriers.read(stage.index), stage.parity ^ 1);
    barrier_arrive(barrier, L::kStage);
    begin_box(base + stage.index * L::kStage, map, 0, bk, a * L::kRows, 0, barrier);
  }
}

// Begins sums = features times the moments at `squares`; the m-th 16 of a warp's tokens.
template <int kChunks>
__device__ __forceinline__ void begin_products(float (&sums)[32],
                                               const Fragment (&features)[kChunks][2], int m,
                                               uint32_t squares) {
  const uint64_t right = wgmma_operand(squares);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    wgmma_by_rows<Half>(sums, features[k][m].registers,
                        GradientLayout<kChunks>::Squares::by_rows(right, 0, k), k > 0);
  }
  wgmma_commit();
}

// 256 tokens: gradients of their features; a warp has 32 tokens, as in feature_gradient_kernel.
template <typename T, int kChunks>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_feature_gradient_kernel(GradientSide side, LinearSums sums, FeatureChunks chunks,
                                      const __grid_constant__ RowMap squares) {
#if IKATTN_WARPGROUP_CODE
  using L = GradientLayout<kChunks>;
  constexpr int F = kChunks <= 4 ? 64 : 128;  // columns that features are in memory
  static_assert(kLiesInSharedMemory<L, L::kStage>);
  const LinearTokens& tokens = side.tokens;
  const EntryBlock at(tokens, blockIdx.x);
  if (is_idle(tokens, sums.prefixes, side.quadratic_blocks, at)) return;  // the whole block
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies.
  if (threadIdx.x >= kProductThreads) {
    give_registers<kCopyRegisters>();
    if (threadIdx.x != kProductThreads) return;
    copy_squares<kChunks>(barriers, base, squares, at.bh / tokens.group);
    return;
  }
  take_registers<kProductRegisters>();

  // 2. The tokens into registers.
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int64_t bk = at.bh / tokens.group;  // not before: nothing would spill but for it
  const bool of_keys = side.logits != nullptr;
  const WarpTokens rows{side, chunks, at.bh, bk, bk, at.first + warp * 32};
  const int count = remaining_of(tokens.N, rows.first);
  Fragment features[kChunks][2], own[kMomentColumns / 16][2];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    load_chunk(features[k], tokens.phi + rows.index(rows.first) * chunks.width, count, chunks, k);
  }
  load_own_rows<T>(own, rows, count);

  // 3. Feature by feature: products with its moments, and these with the own rows.
  Shared<float> dots = shared_cast<float>(shared + L::kDots) + warp * (kDotBytes / 4);
  Shared<float> fits = shared_cast<float>(shared + L::kFits) + warp * (kFitBytes / 4);
  const LinearHead head = sums.heads[bk];
  const float moment_unit = head.moment_unit * (of_keys ? head.row_unit : 1.0f);
  const Half* gram = sums.gram + bk * int64_t{2 * F * F};
  float products[2][32], logit_sums[2][2] = {};
  TileStageOf<kSquareStages> stage;
  const auto begin = [&](int m) {
    begin_products<kChunks>(products[m], features, m, base + stage.index * L::kStage);
  };
  const auto add_dots = [&](float (&parts)[2], int m) {
    sums_are_there(products[m]);
    dots_of_rows<T>(parts, own, m, [&](int n, int i) { return products[m][4 * n + i]; });
    sums_are_there(parts);  // before the next wait
  };
  for (int chunk_a = 0; chunk_a < kChunks; ++chunk_a) {
#pragma unroll 1
    for (int a = 0; a < kChunk; ++a, stage.next()) {
      float parts[2][2];
      barriers.wait(stage);
      begin(0);
      begin(1);
      wgmma_wait<1>();
      add_dots(parts[0], 0);
      wgmma_wait<0>();
      barriers.release(stage.index);
      add_dots(parts[1], 1);
      dots[(t / 2 * 16 + t % 2 * 8 + g) * kDotPitch + a] = sum_of_four(parts);
    }
    __syncwarp();
    float of_gram[2][2][4] = {};
    multiply_by_gram<F>(of_gram, features, gram + chunk_a * kChunk * F);
    store_chunk(rows, chunk_a, dots, fits, of_gram, head.gram_unit, moment_unit, logit_sums);
    __syncwarp();  // before sums of the next chunk
  }

  // 4. Rows of the results.
  finish_rows(rows, fits,
              gridDim.x / static_cast<unsigned>((tokens.N + kEntryTokens - 1) / kEntryTokens));
  if (!of_keys) return;
  load_own_rows<T>(own, rows, count);  // no register holds them over the products
  store_logit_gradients<T>(rows, sums, head, own, logit_sums);
#else
  trap_without_warpgroups(side, sums, chunks, squares);
#endif
}

template <typename T, int kChunks>
const char* queue_gradients(const AttentionParams& params, const GradientSide& side,
                            const LinearSums& sums, const FeatureChunks& chunks, Stream stream) {
  using L = GradientLayout<kChunks>;
  const int64_t heads = params.B * params.key_heads;
  const int64_t blocks = params.B * side.tokens.heads * ceil_div(side.tokens.N, kEntryTokens);
  if (blocks == 0) return nullptr;
  RowMap squares;
  if (const char* error = map_features<kMomentColumns, L::kRows>(squares, sums.squares, heads,
                                                                 int64_t{L::kRows} * L::kRows)) {
    return error;
  }
  return launch(warpgroup_feature_gradient_kernel<T, kChunks>, dim3(static_cast<unsigned>(blocks)),
                dim3(kWarpgroupThreads), L::kBytes, stream, side, sums, chunks, squares);
}

}  // namespace

const char* warpgroup_feature_gradients(const AttentionParams& params, const GradientSide& side,
                                        const LinearSums& sums, Stream stream) {
  const FeatureChunks chunks(params);
  const auto queue = [&]<typename T>() {
    switch (chunks.count) {
      case 2:
        return queue_gradients<T, 2>(params, side, sums, chunks, stream);
      case 4:
        return queue_gradients<T, 4>(params, side, sums, chunks, stream);
      case 6:
        return queue_gradients<T, 6>(params, side, sums, chunks, stream);
      default:
        return queue_gradients<T, 8>(params, side, sums, chunks, stream);
    }
  };
  return side.rows.type == ElementType::kBFloat16 ? queue.template operator()<BFloat16>()
                                                  : queue.template operator()<Half>();
}

}  // namespace ikattn::cuda
