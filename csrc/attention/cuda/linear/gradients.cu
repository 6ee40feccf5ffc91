// Gradients of features without pairs: products with moments for every feature.
#include "attention/cuda/linear/gradient_rows.h"

namespace ikattn::cuda {
namespace {

constexpr int kSquareRows = 64, kSquareStages = 4;
constexpr uint32_t kSquareStage = kSquareRows * kSquareBytes;
constexpr int64_t kGradientBytes =
    kSquareStages * int64_t{kSquareStage} + kEntryWarps * int64_t{kDotBytes + kFitBytes};

// 256 tokens: gradients of their features. For every feature a the moments of all b pass by, and
// the features' product with them is multiplied by the tokens' own rows.
template <typename T, int F>
__global__ void __launch_bounds__(kEntryThreads, 1)
    feature_gradient_kernel(GradientSide side, LinearSums sums, FeatureChunks chunks) {
  constexpr int kPieces = F / kSquareRows;
  const LinearTokens& tokens = side.tokens;
  const EntryBlock at(tokens, blockIdx.x);
  if (is_idle(tokens, sums.prefixes, side.quadratic_blocks, at)) return;  // the whole block
  const int64_t bk = at.bh / tokens.group, place = place_of_sums(tokens, sums.prefixes, at);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int n = chunks.count * kChunk;
  const bool of_keys = side.logits != nullptr;

  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const int row = threadIdx.x / 8, piece_of_row = threadIdx.x % 8;
  const Half* squares = sums.squares + (place * n * n + row) * kMomentColumns + piece_of_row * 8;
  const uint32_t to = base + swizzled(row, piece_of_row, kSquareBytes);
  int remaining = n;  // features whose moments are to be copied
  const auto copy = [&](uint32_t stage, int piece) {
    if (remaining > 0) {
      const int count = piece == 0 && kPieces > 1 ? kSquareRows : n - (kPieces - 1) * kSquareRows;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + 32 * half < count) {
          cp_async_16(to + stage * kSquareStage + half * (kSquareStage / 2),
                      squares + half * 32 * kMomentColumns);
        }
      }
      squares += count * kMomentColumns;
      if (piece == kPieces - 1) --remaining;
    }
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < kSquareStages - 1; ++stage) copy(stage, stage % kPieces);

  const int64_t warp_row = at.first + warp * 32;
  const int count = remaining_of(tokens.N, warp_row);
  const Half* phi = tokens.phi + (at.bh * tokens.N + warp_row) * chunks.width;
  Fragment features[F / 16][2];
#pragma unroll
  for (int k = 0; k < F / 16; ++k) load_chunk(features[k], phi, count, chunks, k);
  const WarpTokens rows_of_warp{side, chunks, at.bh, bk, place, warp_row};
  Fragment own[kMomentColumns / 16][2];
  load_own_rows<T>(own, rows_of_warp, count);

  const FragmentAddresses places = FragmentAddresses::of_rows(base, kSquareBytes);
  Shared<float> dots =
      shared_cast<float>(shared + kSquareStages * kSquareStage) + warp * (kDotBytes / 4);
  Shared<float> fits =
      shared_cast<float>(shared + kSquareStages * kSquareStage + kEntryWarps * kDotBytes) +
      warp * (kFitBytes / 4);
  const LinearHead head = sums.heads[place];
  const float moment_unit = head.moment_unit * (of_keys ? head.row_unit : 1.0f);
  const Half* gram = sums.gram + place * int64_t{2 * F * F};
  float logit_sums[2][2] = {};
  uint32_t stage = 0;
  for (int chunk_a = 0; chunk_a < chunks.count; ++chunk_a) {
#pragma unroll 1
    for (int a = 0; a < kChunk; ++a) {
      float products[2][kMomentColumns / 8][4] = {};
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        cp_async_wait<kSquareStages - 2>();
        __syncthreads();  // the stage is here, and nobody reads the one that comes next
        copy((stage + kSquareStages - 1) % kSquareStages, (piece + kSquareStages - 1) % kPieces);
        const uint32_t down = stage * kSquareStage;
#pragma unroll
        for (int k = 0; k < kSquareRows / 16; ++k) {
          const int chunk_b = piece * (kSquareRows / 16) + k;
          if (chunk_b >= chunks.count) continue;
          multiply_by_rows<Half>(products, features[chunk_b], [&](int column) {
            return down + places.at<kSquareBytes>(k, column);
          });
        }
        stage = (stage + 1) % kSquareStages;
      }
      float parts[2][2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        dots_of_rows<T>(parts[m], own, m, [&](int n, int i) { return products[m][n][i]; });
      }
      dots[(t / 2 * 16 + t % 2 * 8 + g) * kDotPitch + a] = sum_of_four(parts);
    }
    __syncwarp();

    float products[2][2][4] = {};
    multiply_by_gram<F>(products, features, gram + chunk_a * kChunk * F);
    store_chunk(rows_of_warp, chunk_a, dots, fits, products, head.gram_unit, moment_unit,
                logit_sums);
    __syncwarp();  // before sums of the next chunk
  }
  cp_async_wait<0>();

  finish_rows(rows_of_warp, fits,
              gridDim.x / static_cast<unsigned>((tokens.N + kEntryTokens - 1) / kEntryTokens));
  if (of_keys) store_logit_gradients<T>(rows_of_warp, sums, head, own, logit_sums);
}

}  // namespace

const char* feature_gradients(const AttentionParams& params, const GradientSide& side,
                              const LinearSums& sums, Stream stream) {
  const FeatureChunks chunks(params);
  const int64_t blocks = params.B * side.tokens.heads * ceil_div(side.tokens.N, kEntryTokens);
  const auto launch_sides = [&]<typename T>() {
    return launch(
        chunks.columns() == 64 ? feature_gradient_kernel<T, 64> : feature_gradient_kernel<T, 128>,
        dim3(static_cast<unsigned>(blocks)), dim3(kEntryThreads), kGradientBytes, stream, side,
        sums, chunks);
  };
  return side.rows.type == ElementType::kBFloat16 ? launch_sides.template operator()<BFloat16>()
                                                  : launch_sides.template operator()<Half>();
}

}  // namespace ikattn::cuda
