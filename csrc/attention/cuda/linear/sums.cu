// Sums over tokens, from which others compute their results in linear time: moments, and their Gram
// matrix.
#include <algorithm>
#include <cmath>

#include "attention/cuda/linear/part_blocks.h"

namespace ikattn::cuda {
namespace {

constexpr int kMomentThreads = kMomentWarps * 32;
constexpr int kMomentStages = 3;
constexpr uint32_t kRowBytes = 128;
constexpr uint32_t kMomentTile = kStep * kRowBytes;
constexpr uint32_t kMomentStage = 2 * kMomentTile;  // features, and values
constexpr int kSumTokens = 512;

// Sums over kSumTokens tokens of a head; a warp takes one at a time.
__global__ void __launch_bounds__(kMomentThreads, 2)
    token_sum_kernel(LinearTokens tokens, int width, TokenParts parts) {
  constexpr int kMostColumns = 128;  // columns of rows, and of features, at most
  constexpr int kNumbers = kMomentWarps * (kTokenSums + kMostColumns);
  IKATTN_SHARED(float, shared, kNumbers);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = parts.sum_columns();
  const PartBlock at(tokens, parts.of_sums, blockIdx.x);
  if (leaves_out(tokens, at.bk)) return;  // the whole block
  const Half* rows = rows_of<Half>(tokens, tokens.rows, at.bk);
  float terms = 0, squares = 0, fourths = 0, sums[kMostColumns / 64][2] = {};
  for (int64_t j = at.first + warp; j < at.end; j += kMomentWarps) {
    const Half* phi = tokens.phi + (at.bk * tokens.N + j) * width + 2 * lane;
    const Half* row = rows + j * tokens.rows.stride[2] + 2 * lane;
    const float term = tokens.terms[at.bk * padded_tokens(tokens.N) + j];
    const float weight = tokens.has_means ? term : 1;
    float square = 0;
#pragma unroll
    for (int n = 0; n < kMostColumns / 64; ++n) {
      const float2 two =
          64 * n < width ? unpack<Half>(load_vector<uint32_t>(phi + 64 * n)) : make_float2(0, 0);
      square += two.x * two.x + two.y * two.y;
      if (64 * n + 2 * lane >= tokens.row_columns) continue;
      const float2 x = unpack<Half>(load_vector<uint32_t>(row + 64 * n));
      sums[n][0] += weight * x.x;
      sums[n][1] += weight * x.y;
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
    own[kTokenSums + 64 * n + 2 * lane] = sums[n][0];
    own[kTokenSums + 64 * n + 2 * lane + 1] = sums[n][1];
  }
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += kMomentThreads) {
    float sum = 0;
    for (int w = 0; w < kMomentWarps; ++w) sum += shared[w * columns + column];
    parts.sums[int64_t{blockIdx.x} * columns + column] = sum;
  }
}

// The Gram matrix of a part of the tokens: a warp has the rows of every fourth chunk.
template <int F>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    gram_kernel(LinearTokens tokens, FeatureChunks chunks, TokenParts parts) {
  constexpr uint32_t kTile = kStep * 2 * F;
  constexpr int kRowStep = kFoldedThreads / (F / 8), kRowTiles = F / 64;
  const PartBlock at(tokens, parts.of_gram, blockIdx.x);
  if (leaves_out(tokens, at.bk)) return;  // the whole block
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = threadIdx.x / (F / 8), piece = threadIdx.x % (F / 8);
  const bool inside = piece / 2 < chunks.count;
  const Half* phi = tokens.phi + (at.bk * tokens.N + at.first + row) * chunks.width +
                    (inside ? chunks.column(piece / 2) + piece % 2 * 8 : 0);
  const Half* weights =
      tokens.gram_weights == nullptr
          ? nullptr
          : tokens.gram_weights + at.bk * padded_tokens(tokens.N) + at.first + lane % 4 * 2;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const uint32_t to = base + swizzled(row, piece, 2 * F);
  const auto copy = [&](int tile) {
    const int remaining = remaining_of(at.end, at.first + tile * int64_t{kStep});
#pragma unroll
    for (int step = 0; step < kStep / kRowStep; ++step) {
      const bool there = inside && row + step * kRowStep < remaining;
      cp_async_16(
          to + tile % kStages * kTile + step * (kRowStep * 2 * F),
          there ? phi + (tile * kStep + step * kRowStep) * int64_t{chunks.width} : tokens.phi,
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
      if (weights != nullptr) {
        const Half* of_step = weights + tile * kStep + step * 16;  // there is padding to 128
        const uint32_t early = load_vector<uint32_t>(of_step);
        const uint32_t late = load_vector<uint32_t>(of_step + 8);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            left[m].registers[i] = multiply_f16x2(left[m].registers[i], i < 2 ? early : late);
          }
        }
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

// The moments of kPairsTogether pairs of chunks and 64 columns, of a part of the tokens. A warp has
// four a's of a pair and its 16 b's: 64 entries.
__global__ void __launch_bounds__(kMomentThreads, 1)
    moment_kernel(LinearTokens tokens, FeatureChunks chunks, TokenParts parts,
                  uint32_t entry_scale) {
  const int groups = (chunks.pairs() + kPairsTogether - 1) / kPairsTogether;
  const unsigned index = blockIdx.x / groups;
  const PartBlock at(tokens, parts.of_moments, index / parts.slices);
  if (leaves_out(tokens, at.bk)) return;  // the whole block
  const int group = static_cast<int>(blockIdx.x % groups);
  const int slice = static_cast<int>(index % parts.slices);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;

  // 1. A thread's copies: 16 bytes of every 32nd row. Features lie A, B of the first pair, A, B of
  // the second.
  constexpr int kRowStep = kMomentThreads / 8;
  const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
  const int copied_pair = group * kPairsTogether + piece / 4;
  const ChunkPair copied(copied_pair);
  const bool has_features = copied_pair < chunks.pairs();
  const int column = chunks.column(piece / 2 % 2 == 0 ? copied.a : copied.b) + piece % 2 * 8;
  const Half* phi =
      tokens.phi + (at.bk * tokens.N + at.first + row) * chunks.width + (has_features ? column : 0);
  const int64_t value_stride = tokens.rows.stride[2];
  const int value_column = slice * kMomentColumns + piece * 8;
  const bool has_values = value_column < tokens.row_columns;
  const Half* value = rows_of<Half>(tokens, tokens.rows, at.bk) + (at.first + row) * value_stride +
                      (has_values ? value_column : 0);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared), to = base + swizzled(row, piece, kRowBytes);
  const int tiles = at.tiles();
  const auto copy = [&](int tile) {
    if (tile < tiles) {
      const int remaining = remaining_of(at.end, at.first + tile * int64_t{kStep});
      const uint32_t stage = to + tile % kMomentStages * kMomentStage;
#pragma unroll
      for (int step = 0; step < kStep / kRowStep; ++step) {
        const bool there = row + step * kRowStep < remaining;
        const int64_t down = tile * kStep + step * kRowStep;
        const bool of_features = there && has_features, of_values = there && has_values;
        cp_async_16(stage + step * kRowStep * kRowBytes,
                    of_features ? phi + down * chunks.width : tokens.phi, of_features ? 16 : 0);
        cp_async_16(stage + kMomentTile + step * kRowStep * kRowBytes,
                    of_values ? value + down * value_stride : tokens.phi, of_values ? 16 : 0);
      }
    }
    cp_async_commit();
  };

  // 2. Tiles of 64 tokens, four stages ahead: entries in registers, times values.
  const int own = warp / 4, a0 = warp % 4 * kEntryRows;
  const int feature_row = lane % 8 + lane / 16 * 8, feature_half = lane / 8 % 2;
  const uint32_t place_a = swizzled(feature_row, 4 * own + feature_half, kRowBytes);
  const uint32_t place_b = swizzled(feature_row, 4 * own + 2 + feature_half, kRowBytes);
  const FragmentAddresses places = FragmentAddresses::of_rows(kMomentTile, kRowBytes);
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

  // 3. The moments of the part.
  store_moments(parts, chunks, at, slice, group * kPairsTogether + own, a0,
                [&](int r, int n, int i) { return sums[r][n][i]; });
}

// Returns as many shares as give every multiprocessor eight blocks, where a share of all heads has
// so many; of 1024 tokens or more, and of 2^16 at most: tensor cores add up towards zero, and a
// sum's error is as many of its last bits as it has products.
Shares shares_of(const LinearTokens& tokens, int64_t blocks) {
  const int64_t for_all = ceil_div(int64_t{8} * multiprocessors(), blocks > 0 ? blocks : 1);
  const int64_t for_digits = ceil_div(tokens.N, int64_t{1} << 16);
  const int64_t wanted = for_all > for_digits ? for_all : for_digits;
  const int64_t possible = tokens.N / 1024, most = possible > 1 ? possible : 1;
  const int64_t each = ceil_div(tokens.N, wanted < most ? wanted : most);
  Shares shares;
  shares.tokens = ceil_div(each, kStep) * kStep;
  shares.count = shares.of_first = static_cast<int>(ceil_div(tokens.N, shares.tokens));
  shares.of_prefix = 0;
  return shares;
}

// Divides tokens that prefixes add up into shares of `each`, of which chunks have whole ones.
Shares shares_of_prefixes(const LinearTokens& tokens, int64_t each) {
  const Prefixes& prefixes = tokens.prefixes;
  const int64_t chunk = int64_t{prefixes.group} * prefixes.tokens;
  const int64_t end = prefixes.from_end ? tokens.N : std::min(tokens.N, prefixes.count * chunk);
  Shares shares;
  shares.tokens = each;
  shares.from_end = prefixes.from_end;
  shares.begin = prefixes.from_end ? chunk : 0;
  shares.count = static_cast<int>(ceil_div(end - shares.begin, each));
  shares.of_prefix = static_cast<int>(chunk / each);
  // The first prefix from the end has all tokens after the last keys, which may be more than a
  // chunk.
  shares.of_first =
      prefixes.from_end ? shares.count - (prefixes.count - 1) * shares.of_prefix : shares.of_prefix;
  return shares;
}

TokenParts take_token_parts(const AttentionParams& params, const DeviceExecutor& executor,
                            const LinearTokens& tokens, const FeatureChunks& chunks,
                            bool has_moments, TableMemory& memory) {
  TokenParts parts = {};
  parts.slices = moment_slices(params);
  parts.heads = params.B * params.key_heads;
  parts.prefixes = tokens.prefixes.count;
  if (tokens.prefixes.tokens > 0) {
    const int64_t chunk = int64_t{tokens.prefixes.group} * tokens.prefixes.tokens;
    parts.of_moments = parts.of_gram = shares_of_prefixes(tokens, chunk);
    parts.of_sums = shares_of_prefixes(tokens, chunk % kSumTokens == 0 ? kSumTokens : kEntryTokens);
  } else {
    const int count = static_cast<int>(ceil_div(tokens.N, kSumTokens));
    parts.of_moments =
        shares_of(tokens, parts.heads * parts.slices * ceil_div(chunks.pairs(), kPairsTogether));
    parts.of_gram = shares_of(tokens, parts.heads);
    parts.of_sums = {count, kSumTokens, count, 0};
  }
  const int64_t F = chunks.columns(), entries = chunks.pairs() * int64_t{kPairEntries};
  if (has_moments) {
    parts.moments = memory.parts.take(
        executor, parts.of_moments.count * parts.heads * parts.slices * entries * kMomentColumns);
    parts.moment_bounds = executor.take<uint32_t>(parts.heads * parts.prefixes);
  }
  parts.gram = executor.take<float>(parts.of_gram.count * parts.heads * F * F);
  parts.sums = executor.take<float>(parts.heads * parts.of_sums.count * parts.sum_columns());
  return parts;
}

}  // namespace

const char* sum_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                       const LinearTokens& tokens, const float* key_centers, bool wants_moments,
                       bool wants_squares, TableMemory& memory, LinearSums& sums) {
  const FeatureChunks chunks(params);
  const int F = chunks.columns();
  const bool has_moments = wants_moments || wants_squares;
  const TokenParts parts = take_token_parts(params, executor, tokens, chunks, has_moments, memory);
  const int64_t heads = parts.heads, pairs = chunks.pairs(), n = chunks.count * kChunk;
  const int64_t all = heads * parts.prefixes;
  const int64_t moments = all * parts.slices * pairs * (kPairEntries * kMomentColumns);
  sums.moments = wants_moments ? executor.take<Half>(moments) : nullptr;
  sums.squares =
      wants_squares ? memory.squares.take(executor, all * n * n * kMomentColumns) : nullptr;
  sums.gram = executor.take<Half>(all * 2 * F * F);
  sums.centers = executor.take<float>(all * parts.slices * kMomentColumns);
  sums.heads = executor.take<LinearHead>(all);
  sums.prefixes = tokens.prefixes;

  const auto blocks_of = [&](const Shares& shares) {
    return static_cast<unsigned>(heads * shares.count);
  };
  const unsigned of_moments = blocks_of(parts.of_moments) * static_cast<unsigned>(parts.slices) *
                              static_cast<unsigned>(ceil_div(pairs, kPairsTogether));
  const Stream stream = executor.stream;
  const dim3 threads(kMomentThreads);
  if (const char* error = launch(token_sum_kernel, dim3(blocks_of(parts.of_sums)), threads, 0,
                                 stream, tokens, chunks.width, parts)) {
    return error;
  }
  if (const char* error =
          launch(F == 64 ? gram_kernel<64> : gram_kernel<128>, dim3(blocks_of(parts.of_gram)),
                 dim3(kFoldedThreads), kStages * kStep * 2 * F, stream, tokens, chunks, parts)) {
    return error;
  }
  if (has_moments) {
    const char* error =
        launch(moment_kernel, dim3(of_moments), threads, kMomentStages * kMomentStage, stream,
               tokens, chunks, parts, twice_half(tokens.entry_scale));
    if (error != nullptr) return error;
  }
  return finish_sums(params, tokens, parts, sums, key_centers, stream);
}

LinearTokens keys_of(const AttentionParams& params, const FoldedTokens& tokens, Pass pass) {
  LinearTokens keys = {};
  keys.phi = tokens.phi_k;
  keys.N = params.S;
  keys.heads = params.key_heads;
  keys.group = 1;
  keys.rows = tokens.linear.half_value.rows;
  keys.row_heads = params.G;
  keys.row_columns = tokens.linear.half_value.columns;
  keys.terms = tokens.forms.terms;
  keys.has_means = true;
  keys.row_scales = tokens.linear.half_value.scales;
  keys.scale_heads = params.G;
  keys.states = tokens.forms.state;
  keys.left_out = kLeftToPairs;
  keys.prefixes = prefixes_of(params, pass);
  // A feature is at most twice the folded scale of 1.
  const double feature = 2 * static_cast<double>(tokens.forms.root_scale) / (4.0 * params.M);
  int exponent = 0;
  std::frexp(feature * feature, &exponent);
  keys.entry_scale = std::ldexp(1.0f, 15 - exponent);
  return keys;
}

LinearTokens queries_of(const AttentionParams& params, const FoldedTokens& tokens) {
  LinearTokens queries = {};
  queries.phi = tokens.phi_q;
  queries.N = params.L;
  queries.heads = queries.row_heads = params.H;
  queries.group = static_cast<int>(params.H / params.key_heads);
  queries.row_columns = kMomentColumns;
  queries.states = tokens.forms.state;
  queries.left_out = kLeftToPairs;
  queries.entry_scale = 1;
  return queries;
}

}  // namespace ikattn::cuda
