// What the keys add up to, for queries that meet no keys: moments, and their Gram matrix.
#include <cmath>

#include "attention/cuda/folded_tiles.h"
#include "attention/cuda/linear_time.h"

namespace ikattn::cuda {
namespace {

constexpr int kMomentThreads = 256;
constexpr int kMomentWarps = kMomentThreads / 32;
constexpr int kMomentStages = 3;
constexpr int kEntryRows = 4;                                       // a's of a warp
constexpr int kPairsTogether = kMomentWarps * kEntryRows / kChunk;  // of chunks, in a block
constexpr uint32_t kRowBytes = 128;
constexpr uint32_t kMomentTile = kStep * kRowBytes;
constexpr uint32_t kMomentStage = 2 * kMomentTile;  // features, and values
constexpr int kSumKeys = 512;
constexpr int kKeySums = 3;  // beside those of the value: of terms, |phi|^2, |phi|^4

// How keys are shared out, and where the sums of each share are; see LinearKeys.
struct KeyParts {
  int count, sum_count, slices;
  int64_t keys, heads;  // keys of a part, a multiple of kStep
  float* moments;       // [count][B, key_heads, slices, pairs, 256, 64]
  float* gram;          // [count][B, key_heads, columns, columns]; at last the first is their sum
  float* sums;          // [B, key_heads, sum_count, kKeySums + slices * 64]

  __host__ __device__ int sum_columns() const { return kKeySums + slices * kMomentColumns; }
};

// Which head and which of its parts a block is about.
struct PartBlock {
  int64_t bk, first, end;  // keys
  int part;

  __device__ __forceinline__ PartBlock(const AttentionParams& params, const KeyParts& parts,
                                       unsigned index)
      : bk(index / parts.count), part(static_cast<int>(index % parts.count)) {
    first = part * parts.keys;
    end = min(first + parts.keys, params.S);
  }
  __device__ __forceinline__ int tiles() const {
    return static_cast<int>((end - first + kStep - 1) / kStep);
  }
};

__device__ __forceinline__ const Half* key_values(const AttentionParams& params,
                                                  const FoldedTokens& tokens, int64_t bk) {
  const int64_t b = bk / params.key_heads, head = bk % params.key_heads;
  const int64_t* stride = tokens.half_value.stride;
  return static_cast<const Half*>(tokens.half_value.data) + b * stride[0] +
         head * params.G / params.key_heads * stride[1];
}

// Sums over kSumKeys keys of a head; a warp takes one key at a time.
__global__ void __launch_bounds__(kMomentThreads, 2)
    key_sum_kernel(AttentionParams params, FoldedTokens tokens, int width, KeyParts parts) {
  constexpr int kMostColumns = 128;  // of the value, and of features
  IKATTN_SHARED(float, shared, kMomentWarps*(kKeySums + kMostColumns));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = parts.sum_columns();
  const int64_t bk = blockIdx.x / parts.sum_count;
  if (leaves_to_pairs(tokens.state[bk])) return;  // the whole block
  const int64_t first = blockIdx.x % parts.sum_count * int64_t{kSumKeys};
  const Half* values = key_values(params, tokens, bk);
  float terms = 0, squares = 0, fourths = 0, sums[kMostColumns / 64][2] = {};
  for (int64_t j = first + warp; j < min(first + kSumKeys, params.S); j += kMomentWarps) {
    const Half* phi = tokens.phi_k + (bk * params.S + j) * width + 2 * lane;
    const Half* value = values + j * tokens.half_value.stride[2] + 2 * lane;
    const float term = tokens.terms[bk * padded_tokens(params.S) + j];
    float square = 0;
#pragma unroll
    for (int n = 0; n < kMostColumns / 64; ++n) {
      const float2 two =
          64 * n < width ? unpack<Half>(load_vector<uint32_t>(phi + 64 * n)) : make_float2(0, 0);
      square += two.x * two.x + two.y * two.y;
      if (64 * n + 2 * lane >= tokens.half_value_columns) continue;
      const float2 v = unpack<Half>(load_vector<uint32_t>(value + 64 * n));
      sums[n][0] += term * v.x;
      sums[n][1] += term * v.y;
    }
    square = sum_of_lanes(square);
    terms += term;
    squares += square;
    fourths += square * square;
  }
  Shared<float> own = shared + warp * columns;
  if (lane == 0) {
    own[0] = terms;
    own[1] = squares;
    own[2] = fourths;
  }
#pragma unroll
  for (int n = 0; n < kMostColumns / 64; ++n) {
    if (n >= parts.slices) continue;
    own[kKeySums + 64 * n + 2 * lane] = sums[n][0];
    own[kKeySums + 64 * n + 2 * lane + 1] = sums[n][1];
  }
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += kMomentThreads) {
    float sum = 0;
    for (int w = 0; w < kMomentWarps; ++w) sum += shared[w * columns + column];
    parts.sums[int64_t{blockIdx.x} * columns + column] = sum;
  }
}

// The Gram matrix of a part of the keys: a warp has the rows of every fourth chunk.
template <int F>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    gram_kernel(AttentionParams params, FoldedTokens tokens, FeatureChunks chunks, KeyParts parts) {
  constexpr uint32_t kTile = kStep * 2 * F;
  constexpr int kRowStep = kFoldedThreads / (F / 8), kRowTiles = F / 64;
  const PartBlock at(params, parts, blockIdx.x);
  if (leaves_to_pairs(tokens.state[at.bk])) return;  // the whole block
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = threadIdx.x / (F / 8), piece = threadIdx.x % (F / 8);
  const bool inside = piece / 2 < chunks.count;
  const Half* phi = tokens.phi_k + (at.bk * params.S + at.first + row) * chunks.width +
                    (inside ? chunks.column(piece / 2) + piece % 2 * 8 : 0);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const uint32_t to = base + swizzled(row, piece, 2 * F);
  const auto copy = [&](int tile) {
    const int left = left_of(at.end, at.first + tile * int64_t{kStep});
#pragma unroll
    for (int step = 0; step < kStep / kRowStep; ++step) {
      const bool there = inside && row + step * kRowStep < left;
      cp_async_16(
          to + tile % kStages * kTile + step * (kRowStep * 2 * F),
          there ? phi + (tile * kStep + step * kRowStep) * int64_t{chunks.width} : tokens.phi_k,
          there ? 16 : 0);
    }
    cp_async_commit();
  };
  float sums[kRowTiles][F / 8][4] = {};
  copy(0);
  for (int tile = 0; tile < at.tiles(); ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (tile + 1 < at.tiles()) copy(tile + 1);
    const uint32_t stage = base + tile % kStages * kTile;
#pragma unroll 1
    for (int step = 0; step < kStep / 16; ++step) {
      const uint32_t rows = stage + step * 16 * 2 * F;
      Fragment left[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ldmatrix_x4_trans(
            left[m].registers,
            rows + swizzled(lane % 8 + lane / 16 * 8, 2 * (warp + 4 * m) + lane / 8 % 2, 2 * F));
      }
      multiply_by_rows<Half>(
          sums, left, [&](int n) { return rows + swizzled(lane % 16, 2 * n + lane / 16, 2 * F); });
    }
  }
  float* gram = parts.gram + (at.part * parts.heads + at.bk) * (F * F);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to_row = gram + ((warp + 4 * m) * 16 + lane / 4 + 8 * half) * F;
      for_pairs<F>([&](int column, int n) {
        store_vector(to_row + column, make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]));
      });
    }
  }
}

// The moments of kPairsTogether pairs of chunks and 64 columns, of a part of the keys. A warp has
// four a's of a pair and its 16 b's: 64 entries.
__global__ void __launch_bounds__(kMomentThreads, 1)
    moment_kernel(AttentionParams params, FoldedTokens tokens, FeatureChunks chunks, KeyParts parts,
                  uint32_t entry_scale) {
  const int groups = (chunks.pairs() + kPairsTogether - 1) / kPairsTogether;
  const unsigned index = blockIdx.x / groups;
  const PartBlock at(params, parts, index / parts.slices);
  if (leaves_to_pairs(tokens.state[at.bk])) return;  // the whole block
  const int group = static_cast<int>(blockIdx.x % groups);
  const int slice = static_cast<int>(index % parts.slices);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;

  // What a thread copies: 16 bytes of every 32nd row. Features lie A, B of the first pair, A, B of
  // the second.
  constexpr int kRowStep = kMomentThreads / 8;
  const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
  const int copied_pair = group * kPairsTogether + piece / 4;
  const ChunkPair copied(copied_pair);
  const bool has_features = copied_pair < chunks.pairs();
  const int column = chunks.column(piece / 2 % 2 == 0 ? copied.a : copied.b) + piece % 2 * 8;
  const Half* phi = tokens.phi_k + (at.bk * params.S + at.first + row) * chunks.width +
                    (has_features ? column : 0);
  const int64_t value_stride = tokens.half_value.stride[2];
  const int value_column = slice * kMomentColumns + piece * 8;
  const bool has_values = value_column < tokens.half_value_columns;
  const Half* value = key_values(params, tokens, at.bk) + (at.first + row) * value_stride +
                      (has_values ? value_column : 0);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared), to = base + swizzled(row, piece, kRowBytes);
  const int tiles = at.tiles();
  const auto copy = [&](int tile) {
    if (tile < tiles) {
      const int left = left_of(at.end, at.first + tile * int64_t{kStep});
      const uint32_t stage = to + tile % kMomentStages * kMomentStage;
#pragma unroll
      for (int step = 0; step < kStep / kRowStep; ++step) {
        const bool there = row + step * kRowStep < left;
        const int64_t down = tile * kStep + step * kRowStep;
        const bool of_features = there && has_features, of_values = there && has_values;
        cp_async_16(stage + step * kRowStep * kRowBytes,
                    of_features ? phi + down * chunks.width : tokens.phi_k, of_features ? 16 : 0);
        cp_async_16(stage + kMomentTile + step * kRowStep * kRowBytes,
                    of_values ? value + down * value_stride : tokens.phi_k, of_values ? 16 : 0);
      }
    }
    cp_async_commit();
  };

  const int own = warp / 4, a0 = warp % 4 * kEntryRows;
  const int feature_row = lane % 8 + lane / 16 * 8, feature_half = lane / 8 % 2;
  const uint32_t place_a = swizzled(feature_row, 4 * own + feature_half, kRowBytes);
  const uint32_t place_b = swizzled(feature_row, 4 * own + 2 + feature_half, kRowBytes);
  const FragmentPlaces places = FragmentPlaces::of_rows(kMomentTile, kRowBytes);
  float sums[kEntryRows][kMomentColumns / 8][4] = {};
  for (int tile = 0; tile < kMomentStages - 1; ++tile) copy(tile);
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<kMomentStages - 2>();
    __syncthreads();  // the tile is here, and nobody reads the stage that comes next
    copy(tile + kMomentStages - 1);
    const uint32_t stage = base + tile % kMomentStages * kMomentStage;
#pragma unroll 1
    for (int step = 0; step < kStep / 16; ++step) {
      const uint32_t down = stage + step * 16 * kRowBytes;
      uint32_t a[4], b[4], values[kMomentColumns / 16][4];
      ldmatrix_x4_trans(a, down + place_a);
      ldmatrix_x4_trans(b, down + place_b);
#pragma unroll
      for (int n = 0; n < kMomentColumns / 16; ++n) {
        ldmatrix_x4_trans(values[n], down + places.at<kRowBytes>(0, n));
      }
      // The lane's two rows of the transposed a, one for each eight keys.
      const uint32_t early = multiply_f16x2(a0 < 8 ? a[0] : a[1], entry_scale);
      const uint32_t late = multiply_f16x2(a0 < 8 ? a[2] : a[3], entry_scale);
#pragma unroll
      for (int r = 0; r < kEntryRows; ++r) {
        const int from = (a0 + r) % 8 * 4 + t;
        const uint32_t of_early = __shfl_sync(0xffffffffu, early, from);
        const uint32_t of_late = __shfl_sync(0xffffffffu, late, from);
        const uint32_t entries[4] = {multiply_f16x2(b[0], of_early), multiply_f16x2(b[1], of_early),
                                     multiply_f16x2(b[2], of_late), multiply_f16x2(b[3], of_late)};
#pragma unroll
        for (int n = 0; n < kMomentColumns / 16; ++n) {
          mma_m16n8k16<Half>(sums[r][2 * n], entries, values[n][0], values[n][1]);
          mma_m16n8k16<Half>(sums[r][2 * n + 1], entries, values[n][2], values[n][3]);
        }
      }
    }
  }
  cp_async_wait<0>();

  const int pair = group * kPairsTogether + own;
  if (pair >= chunks.pairs()) return;
  float* rows =
      parts.moments +
      (((at.part * parts.heads + at.bk) * parts.slices + slice) * int64_t{chunks.pairs()} + pair) *
          (kPairEntries * kMomentColumns);
#pragma unroll
  for (int r = 0; r < kEntryRows; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* entry = rows + ((a0 + r) * kChunk + lane / 4 + 8 * half) * kMomentColumns;
      for_pairs<kMomentColumns>([&](int at_column, int n) {
        store_vector(entry + at_column,
                     make_float2(sums[r][n][2 * half], sums[r][n][2 * half + 1]));
      });
    }
  }
}

// Of a head, a block: its center, its numbers, and the Gram matrix as two numbers of Half each.
__global__ void __launch_bounds__(kMomentThreads, 2)
    finish_head_kernel(AttentionParams params, FoldedTokens tokens, int F, KeyParts parts,
                       LinearKeys keys) {
  IKATTN_SHARED(float, maxima, kMomentWarps);
  IKATTN_SHARED(float, totals, kKeySums);
  const int64_t bk = blockIdx.x;
  if (leaves_to_pairs(tokens.state[bk])) return;  // the whole block
  const int columns = parts.sum_columns();
  const auto sum_of = [&](int column) {
    const float* sums = parts.sums + bk * parts.sum_count * columns + column;
    float sum = 0;
    for (int part = 0; part < parts.sum_count; ++part) sum += sums[int64_t{part} * columns];
    return sum;
  };
  if (threadIdx.x < kKeySums) totals[threadIdx.x] = sum_of(static_cast<int>(threadIdx.x));
  float* gram = parts.gram + bk * (F * F);
  float most = 0;
  for (int index = threadIdx.x; index < F * F; index += kMomentThreads) {
    float sum = gram[index];
    for (int part = 1; part < parts.count; ++part) {
      sum += gram[part * parts.heads * (F * F) + index];
    }
    gram[index] = sum;
    if (index / F == index % F) most = fmaxf(most, sum);  // the largest are on the diagonal
  }
  most = max_of_lanes(most);
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = most;
  __syncthreads();
  for (int warp = 0; warp < kMomentWarps; ++warp) {
    const float other = maxima[warp];
    most = fmaxf(most, other);
  }
  const float terms = totals[0], squares = totals[1], fourths = totals[2];
  for (int c = threadIdx.x; c < columns - kKeySums; c += kMomentThreads) {
    keys.centers[bk * (columns - kKeySums) + c] = terms > 0 ? sum_of(kKeySums + c) / terms : 0.0f;
  }
  const float fit = fitting_power(most);
  Half* high = keys.gram + bk * 2 * (F * F);
  for (int index = threadIdx.x; index < F * F; index += kMomentThreads) {
    const float scaled = gram[index] * fit;
    const Half rounded = to_half(scaled);
    high[index] = rounded;
    high[F * F + index] = to_half(scaled - to_float(rounded));
  }
  if (threadIdx.x != 0) return;
  const int64_t b = bk / params.key_heads, head = bk % params.key_heads;
  const float* scales = tokens.half_value_scales;
  const float value_scale =
      scales == nullptr ? 1.0f : scales[b * params.G + head * params.G / params.key_heads];
  // |v_j - m| is at most twice the bound, and entries count twice; 2^-10 for what is rounded.
  const float bound = __uint_as_float(tokens.value_bounds[bk]) * value_scale;
  LinearHead result;
  result.eps_terms = terms;
  result.squares = squares > 0 ? squares + 32 * (fourths / squares) : 0.0f;
  result.gram_unit = 1 / fit;
  result.moment_fit = fitting_power(4.004f * bound * (most * keys.entry_scale));
  result.value_unit = 1 / value_scale;
  result.moment_unit = 1 / (result.moment_fit * keys.entry_scale) * result.value_unit;
  keys.heads[bk] = result;
}

// The sums of all parts, less the center's share, as Half; a thread has two columns.
__global__ void __launch_bounds__(kMomentThreads, 2)
    finish_moments_kernel(FoldedTokens tokens, int pairs, int F, KeyParts parts, LinearKeys keys) {
  constexpr int kPairColumns = kMomentColumns / 2;
  const int64_t index = int64_t{blockIdx.x} * kMomentThreads + threadIdx.x;
  const int64_t of_head = int64_t{parts.slices} * pairs * (kPairEntries * kPairColumns);
  const int64_t bk = index / of_head;
  if (bk >= parts.heads || leaves_to_pairs(tokens.state[bk])) return;
  const int in_head = static_cast<int>(index % of_head);
  const int c = in_head % kPairColumns * 2, entry = in_head / kPairColumns % kPairEntries;
  const int pair = in_head / (kPairColumns * kPairEntries) % pairs;
  const int slice = in_head / (kPairColumns * kPairEntries) / pairs;
  float2 sum = make_float2(0, 0);
  for (int part = 0; part < parts.count; ++part) {
    const float2 own =
        load_vector<float2>(parts.moments + (part * parts.heads * of_head + index) * 2);
    sum.x += own.x;
    sum.y += own.y;
  }
  const ChunkPair chunks(pair);
  const int row = chunks.a * kChunk + entry / kChunk, column = chunks.b * kChunk + entry % kChunk;
  const float weight = parts.gram[bk * (F * F) + row * F + column] * keys.entry_scale;
  const float2 center =
      load_vector<float2>(keys.centers + (bk * parts.slices + slice) * kMomentColumns + c);
  const float fit = keys.heads[bk].moment_fit * (chunks.a == chunks.b ? 1 : 2);
  store_vector(keys.moments + 2 * index,
               pack_f16x2((sum.x - center.x * weight) * fit, (sum.y - center.y * weight) * fit));
}

KeyParts take_key_parts(const AttentionParams& params, const DeviceExecutor& executor,
                        const FeatureChunks& chunks) {
  KeyParts parts;
  parts.slices = moment_slices(params);
  parts.heads = params.B * params.key_heads;
  // Blocks for every multiprocessor twice, of 1024 keys or more.
  const int64_t blocks = parts.heads * parts.slices * ceil_div(chunks.pairs(), kPairsTogether);
  const int64_t wanted = ceil_div(int64_t{2} * multiprocessors(), blocks > 0 ? blocks : 1);
  const int64_t possible = params.S / 1024, most = possible > 1 ? possible : 1;
  parts.keys = ceil_div(ceil_div(params.S, wanted < most ? wanted : most), kStep) * kStep;
  parts.count = static_cast<int>(ceil_div(params.S, parts.keys));
  parts.sum_count = static_cast<int>(ceil_div(params.S, kSumKeys));
  const int64_t F = chunks.columns(), entries = chunks.pairs() * int64_t{kPairEntries};
  parts.moments =
      executor.take<float>(parts.count * parts.heads * parts.slices * entries * kMomentColumns);
  parts.gram = executor.take<float>(parts.count * parts.heads * F * F);
  parts.sums = executor.take<float>(parts.heads * parts.sum_count * parts.sum_columns());
  return parts;
}

}  // namespace

const char* linear_keys(const AttentionParams& params, const DeviceExecutor& executor,
                        const FoldedTokens& tokens, LinearKeys& keys) {
  const FeatureChunks chunks(params);
  const int F = chunks.columns();
  const KeyParts parts = take_key_parts(params, executor, chunks);
  const int64_t heads = parts.heads, pairs = chunks.pairs();
  const int64_t moments = heads * parts.slices * pairs * (kPairEntries * kMomentColumns);
  keys.moments = executor.take<Half>(moments);
  keys.gram = executor.take<Half>(heads * 2 * F * F);
  keys.centers = executor.take<float>(heads * parts.slices * kMomentColumns);
  keys.heads = executor.take<LinearHead>(heads);
  // A feature is at most twice the folded scale of 1.
  const double feature = 2 * static_cast<double>(tokens.root_scale) / (4.0 * params.M);
  int exponent = 0;
  std::frexp(feature * feature, &exponent);
  keys.entry_scale = std::ldexp(1.0f, 15 - exponent);
  const Half scale = to_half(keys.entry_scale);
  const uint32_t scales = scale.bits | uint32_t{scale.bits} << 16;

  const unsigned of_parts = static_cast<unsigned>(heads * parts.count);
  const unsigned groups = static_cast<unsigned>(ceil_div(pairs, kPairsTogether));
  if (const char* error =
          launch(key_sum_kernel, dim3(static_cast<unsigned>(heads * parts.sum_count)),
                 dim3(kMomentThreads), 0, executor.stream, params, tokens, chunks.width, parts)) {
    return error;
  }
  if (const char* error =
          launch(F == 64 ? gram_kernel<64> : gram_kernel<128>, dim3(of_parts), dim3(kFoldedThreads),
                 kStages * kStep * 2 * F, executor.stream, params, tokens, chunks, parts)) {
    return error;
  }
  if (const char* error =
          launch(moment_kernel, dim3(of_parts * static_cast<unsigned>(parts.slices) * groups),
                 dim3(kMomentThreads), kMomentStages * kMomentStage, executor.stream, params,
                 tokens, chunks, parts, scales)) {
    return error;
  }
  if (const char* error =
          launch(finish_head_kernel, dim3(static_cast<unsigned>(heads)), dim3(kMomentThreads), 0,
                 executor.stream, params, tokens, F, parts, keys)) {
    return error;
  }
  return launch(finish_moments_kernel,
                dim3(static_cast<unsigned>(ceil_div(moments / 2, kMomentThreads))),
                dim3(kMomentThreads), 0, executor.stream, tokens, chunks.pairs(), F, parts, keys);
}

}  // namespace ikattn::cuda
