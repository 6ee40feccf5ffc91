// The parts of attention from features: a block takes 128 keys of a head for the queries, up to 16,
// that share them: those of a token after the other, of all heads of a group. What counts is to
// read features and values once.
#include <numeric>

#include "attention/cuda/decoding/parts.h"
#include "attention/cuda/decoding/pieces.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kWarpKeys = kPartKeys / kWarps;
constexpr int kLanes = 8;  // lanes of a row, with a piece each
constexpr int kSideBySide = 32 / kLanes;

// Rows of the result that read the same keys and values.
struct SharedReads {
  int64_t heads;       // heads of queries, one after the other
  int64_t row_blocks;  // blocks of `heads` times L rows
};

// Part of the result that a block computes.
template <int kRows>
struct Place {
  int64_t b, first_head, first_row, part, first_key;
  int rows, keys;
  unsigned L, H;

  __device__ Place(const FromFeaturesParams& params, const SharedReads& reads, int64_t parts)
      : L(static_cast<unsigned>(params.L)), H(static_cast<unsigned>(params.H)) {
    int64_t index = blockIdx.x;
    first_row = index % reads.row_blocks * kRows;
    index /= reads.row_blocks;
    part = index % parts;
    index /= parts;
    const int64_t groups = params.H / reads.heads;
    first_head = index % groups * reads.heads;
    b = index / groups;
    first_key = part * kPartKeys;
    rows = static_cast<int>(min(int64_t{kRows}, reads.heads * params.L - first_row));
    keys = static_cast<int>(min(int64_t{kPartKeys}, params.S - first_key));
  }
  // Returns a row's index. A grid has no 2^32 blocks, so there are no more rows; and a division in
  // 64 bits is slow.
  __device__ unsigned own(int row) const { return static_cast<unsigned>(first_row) + row; }
  __device__ int64_t head(int row) const { return first_head + own(row) / L; }
  __device__ int64_t query(int row) const { return own(row) % L; }
  // Returns the index among the rows [B, H, L].
  __device__ int64_t index(int row) const { return (b * H + head(row)) * L + query(row); }
};

// Shared memory of a block.
template <typename T, typename S, int kRows>
struct Layout {
  // Lanes of a warp that have the same keys' values share out the rows.
  static constexpr int kRowLanes = kRows < kSideBySide ? kRows : kSideBySide;
  static constexpr int kKeyLanes = kSideBySide / kRowLanes;
  static constexpr int kLaneRows = kRows / kRowLanes;
  static constexpr int kColumns = kLanes * Piece<S>::kColumns;  // columns of the value, at a time
  static constexpr int kSlots = kWarps * kKeyLanes;
  static constexpr int kLogitPitch = kPartKeys + 1, kSlotPitch = kColumns + 1;

  Shared<T> queries;  // [kRows][width]
  Shared<T> logits;   // [kRows][kLogitPitch]
  // [kSlots][kRows][kSlotPitch]  weighted values, and the sum of weights; in the place of queries
  // and logits
  Shared<T> slots;
  Shared<T> weights;  // [kPartKeys][kRows]  scores first; -1: hidden
  Shared<T> maxima;   // [kRows]
  int width;          // width of a query's features, with zeros up to whole pieces for all lanes

  __device__ explicit Layout(int64_t F) : width(width_of(F)) {
    queries = slots = dynamic_shared<T>();
    logits = queries + kRows * width;
    weights = queries + first_numbers(F);
    maxima = weights + kPartKeys * kRows;
  }
  __host__ __device__ static int width_of(int64_t F) {
    constexpr int kTogether = kLanes * Piece<T>::kColumns;
    return static_cast<int>((F + kTogether - 1) / kTogether) * kTogether;
  }
  // Returns how many numbers queries and logits take, or slots.
  __host__ __device__ static int first_numbers(int64_t F) {
    const int of_scores = kRows * (width_of(F) + kLogitPitch);
    const int of_slots = kSlots * kRows * kSlotPitch;
    return of_scores > of_slots ? of_scores : of_slots;
  }
  static int64_t bytes(int64_t F) {
    return (first_numbers(F) + kPartKeys * kRows + kRows) * int64_t{sizeof(T)};
  }
};

// Loads queries' features, divided by 2 F, logits, and the largest logit of each row, which a NaN
// never becomes, into shared memory; rows and keys that are not there are zeros, and hidden.
// Returns whether the thread has seen a key that is not hidden.
template <typename T, typename S, int kRows>
__device__ bool load_rows(const FromFeaturesParams& params, const Place<kRows>& at,
                          const Layout<T, S, kRows>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T norm = T(0.5) / static_cast<T>(params.F);
  bool any = false;
  for (int row = warp; row < kRows; row += kWarps) {
    const bool there = row < at.rows;
    const int64_t head = there ? at.head(row) : 0, i = there ? at.query(row) : 0;
    const Tokens query(params.query, at.b, head), logits(params.logits, at.b, head);
    for (int f = lane; f < shared.width; f += 32) {
      const bool inside = there && f < params.F;
      shared.queries[row * shared.width + f] = inside ? query.template load<T>(i, f) * norm : T(0);
    }
    T largest = minus_infinity<T>();
#pragma unroll
    for (int key = lane; key < kPartKeys; key += 32) {
      T logit = minus_infinity<T>();
      if (there && key < at.keys) logit = logits.template load<T>(i, at.first_key + key);
      any = any || logit != minus_infinity<T>();
      largest = logit > largest ? logit : largest;
      shared.logits[row * shared.kLogitPitch + key] = logit;
    }
    largest = max_of_lanes(largest);
    if (lane == 0) shared.maxima[row] = largest;
  }
  return any;
}

// Computes the scores of a warp's own keys and all rows, in the place of their weights. A lane adds
// up pieces of four keys, and the eight of a key are added up.
template <typename T, typename S, int kRows>
__device__ __forceinline__ void score_keys(const FromFeaturesParams& params, const Place<kRows>& at,
                                           const Layout<T, S, kRows>& shared) {
  constexpr int kEach = kWarpKeys / kSideBySide;
  const int chunk = threadIdx.x % kLanes;
  const int key = threadIdx.x / 32 * kWarpKeys + threadIdx.x % 32 / kLanes;
  const int64_t head = at.first_head / (params.H / params.key_heads);
  const PieceRows<T> rows(params.key, at.b, head, params.F);
  T scores[kEach][kRows] = {};
#pragma unroll(kRows < 16 ? 2 : 1)
  for (int column = chunk * Piece<T>::kColumns; column < shared.width;
       column += kLanes * Piece<T>::kColumns) {
    Piece<T> keys[kEach];
    rows.load(keys, at.first_key + key, kSideBySide, at.first_key + at.keys, column);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const Piece<T> query = load_vector<Piece<T>>(shared.queries + row * shared.width + column);
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
#pragma unroll
        for (int i = 0; i < Piece<T>::kColumns; ++i) {
          scores[k][row] += keys[k].element[i] * query.element[i];
        }
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const T score = sum_of_lanes<kLanes>(scores[k][row]);
      if ((k * kRows + row) % kLanes == chunk) {
        shared.weights[(key + k * kSideBySide) * kRows + row] = score;
      }
    }
  }
}

// Makes weights of the scores of a warp's own keys, relative to the largest.
template <typename T, typename S, int kRows>
__device__ void weigh_keys(T eps, const Layout<T, S, kRows>& shared) {
  const int first_key = threadIdx.x / 32 * kWarpKeys;
  for (int index = threadIdx.x % 32; index < kWarpKeys * kRows; index += 32) {
    const int row = index % kRows, key = first_key + index / kRows;
    const T logit = shared.logits[row * shared.kLogitPitch + key];
    const T score = shared.weights[key * kRows + row], largest = shared.maxima[row];
    const T reference = largest == minus_infinity<T>() ? T(0) : largest;
    const bool hidden = logit == minus_infinity<T>();
    shared.weights[key * kRows + row] =
        hidden ? T(-1) : (score * score + eps) * exponential(logit - reference);
  }
}

// Weighted values of a warp's own keys, from `column0` on, and the sums of weights: one slot for
// the lanes that have the same keys. The value of a hidden key is not touched, whatever it holds.
template <typename T, typename S, int kRows>
struct WeightedValues {
  using Shape = Layout<T, S, kRows>;
  static constexpr int kColumns = Piece<S>::kColumns;

  T values[Shape::kLaneRows][kColumns] = {};
  T sums[Shape::kLaneRows] = {};
  int chunk = threadIdx.x % kLanes, warp = threadIdx.x / 32;
  int first_row = threadIdx.x % 32 / kLanes % Shape::kRowLanes * Shape::kLaneRows;
  int key_lane = threadIdx.x % 32 / kLanes / Shape::kRowLanes;

  __device__ __forceinline__ void add(const PieceRows<S>& rows, const Place<kRows>& at,
                                      int64_t column0, const Shape& shared) {
    constexpr int kEach = kWarpKeys / Shape::kKeyLanes, kTogether = kEach < 8 ? kEach : 8;
#pragma unroll 1
    for (int first = 0; first < kEach; first += kTogether) {
      const int key = warp * kWarpKeys + key_lane + first * Shape::kKeyLanes;
      Piece<S> pieces[kTogether];
      rows.load(pieces, at.first_key + key, Shape::kKeyLanes, at.first_key + at.keys,
                column0 + chunk * kColumns);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
#pragma unroll
        for (int row = 0; row < Shape::kLaneRows; ++row) {
          const T weight = shared.weights[(key + k * Shape::kKeyLanes) * kRows + first_row + row];
          const bool seen = !(weight < T(0));
          if (seen) sums[row] += weight;
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            if (seen) values[row][i] += weight * convert<T>(pieces[k].element[i]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void store(const Shape& shared) const {
    const int slot = warp * Shape::kKeyLanes + key_lane;
#pragma unroll
    for (int row = 0; row < Shape::kLaneRows; ++row) {
      const int place = (slot * kRows + first_row + row) * Shape::kSlotPitch;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        shared.slots[place + chunk * kColumns + i] = values[row][i];
      }
      if (chunk == 0) shared.slots[place + Shape::kColumns] = sums[row];
    }
  }
};

// Adds the slots' sums, in their order, to the part's results.
template <typename T, typename S, int kRows>
__device__ void add_slots(const Place<kRows>& at, int64_t column0, int64_t d_v,
                          const Layout<T, S, kRows>& shared, const PartialRows<T>& partial) {
  using Shape = Layout<T, S, kRows>;
  for (int index = threadIdx.x; index < at.rows * Shape::kSlotPitch; index += kThreads) {
    const int row = index / Shape::kSlotPitch, column = index % Shape::kSlotPitch;
    T sum = 0;
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
      sum += shared.slots[(slot * kRows + row) * Shape::kSlotPitch + column];
    }
    const int64_t to = at.index(row) * partial.parts + at.part;
    if (column < Shape::kColumns) {
      if (column0 + column < d_v) partial.out[to * d_v + column0 + column] = sum;
    } else if (column0 == 0) {
      partial.sums[to] = sum;
      partial.maxima[to] = shared.maxima[row];
    }
  }
}

template <typename T, typename S, int kRows>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 2)
    part_kernel(FromFeaturesParams params, SharedReads reads, PartialRows<T> partial) {
  const Place<kRows> at(params, reads, partial.parts);
  const Layout<T, S, kRows> shared(params.F);
  if (!__syncthreads_or(load_rows(params, at, shared))) {
    for (int row = threadIdx.x; row < at.rows; row += kThreads) {
      const int64_t to = at.index(row) * partial.parts + at.part;
      partial.maxima[to] = minus_infinity<T>();
      partial.sums[to] = T(0);
    }
    return;
  }
  score_keys(params, at, shared);
  __syncthreads();
  weigh_keys(static_cast<T>(params.eps), shared);
  const int64_t head = at.first_head / (params.H / params.value_heads);
  const PieceRows<S> values(params.value, at.b, head, params.d_v);
  for (int64_t column0 = 0; column0 < params.d_v; column0 += shared.kColumns) {
    __syncthreads();  // nobody reads logits, or slots, any more
    WeightedValues<T, S, kRows> weighted;
    weighted.add(values, at, column0, shared);
    weighted.store(shared);
    __syncthreads();
    add_slots(at, column0, params.d_v, shared, partial);
  }
}

template <typename T, typename S, int kRows>
const char* launch_parts(const FromFeaturesParams& params, SharedReads reads,
                         const PartialRows<T>& partial, Stream stream) {
  reads.row_blocks = ceil_div(reads.heads * params.L, kRows);
  const int64_t blocks = params.B * (params.H / reads.heads) * partial.parts * reads.row_blocks;
  return launch(part_kernel<T, S, kRows>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                Layout<T, S, kRows>::bytes(params.F), stream, params, reads, partial);
}

// For 16 rows, or 4, if their features leave room: of both a row has the same bits.
template <typename T, typename S>
const char* launch_rows_of(FromFeaturesParams params, const DeviceExecutor& executor,
                           const PartialRows<T>& partial) {
  constexpr int64_t kRoom = 64 * 1024;
  SharedReads reads = {};
  reads.heads = std::gcd(params.H / params.key_heads, params.H / params.value_heads);
  const Stream stream = executor.stream;
  const int64_t rows = reads.heads * params.L;
  const char* error =
      lay_in_pieces<T>(executor, params.B, params.key_heads, params.S, params.F, params.key);
  if (error != nullptr) return error;
  error =
      lay_in_pieces<S>(executor, params.B, params.value_heads, params.S, params.d_v, params.value);
  if (error != nullptr) return error;
  if constexpr (sizeof(T) == 4) {
    if (rows > 4 && Layout<T, S, 16>::bytes(params.F) <= kRoom) {
      return launch_parts<T, S, 16>(params, reads, partial, stream);
    }
  }
  if (Layout<T, S, 4>::bytes(params.F) <= kRoom) {
    return launch_parts<T, S, 4>(params, reads, partial, stream);
  }
  return launch_parts<T, S, 1>(params, reads, partial, stream);
}

}  // namespace

template <typename T>
const char* attend_parts(const FromFeaturesParams& params, const DeviceExecutor& executor,
                         const PartialRows<T>& partial) {
  switch (params.value.type) {
    case ElementType::kFloat64:
      return launch_rows_of<T, double>(params, executor, partial);
    case ElementType::kFloat32:
      return launch_rows_of<T, float>(params, executor, partial);
    case ElementType::kBFloat16:
      return launch_rows_of<T, BFloat16>(params, executor, partial);
    default:
      return launch_rows_of<T, Half>(params, executor, partial);
  }
}

template const char* attend_parts<float>(const FromFeaturesParams&, const DeviceExecutor&,
                                         const PartialRows<float>&);
template const char* attend_parts<double>(const FromFeaturesParams&, const DeviceExecutor&,
                                          const PartialRows<double>&);

}  // namespace ikattn::cuda
