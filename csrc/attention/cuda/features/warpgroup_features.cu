// Features of tokens of 16 bits on Hopper: what split_feature_kernel (tensor_cores.cu) makes, of at
// most 64 frequencies and 128 dimensions, with angles by wgmma. The products of the next 16
// frequencies go on while a warp makes the sines of the last; tokens are in registers, and
// frequencies in shared memory for all tiles of a block.
//
// Compiled for sm_90a alone.
#include <algorithm>

#include "attention/cuda/features/feature_blocks.h"
#include "attention/cuda/features/split_weights.h"
#include "attention/cuda/features/warpgroup_angles.h"

namespace ikattn::cuda {
namespace {

constexpr int kMostSlices = 2;
constexpr int64_t kMostTokens = int64_t{1} << 30;  // of a head, which 32 bits count

// The angles of a warp's 16 tokens, by steps of 16 frequencies.
template <typename T, int kSets, int kWidth, int kSlices>
class AngleSteps {
 public:
  // Tokens of a block at a time: 64 of each warpgroup, 16 of each warp.
  static constexpr int kTokens = kSplitThreads / 128 * kGroupRows;
  static constexpr int kSteps = kWidth / 32;
  static constexpr int kCount = 8 * kSets;  // of a thread's angles of a step
  static constexpr int kRows = kSteps * 2 * kCount;
  static constexpr uint32_t kNumberBytes = kRows * 128;
  static constexpr uint32_t kFrequencyBytes = kSlices * 2 * kNumberBytes;
  static constexpr int64_t kBytes = kFrequencyBytes + kTokens * kSlices * kBoxDimensions * 2;

  // Begins to copy frequencies, and the first tokens. By the whole block, which meets.
  __device__ __forceinline__ AngleSteps(const FeatureSource& source,
                                        const SplitFrequencies& frequencies, unsigned bh, int first,
                                        Shared<unsigned char> shared)
      : source_(source), base_(shared_address(shared)), tokens_(base_ + kFrequencyBytes, kSlices) {
    const unsigned heads = static_cast<unsigned>(source.heads);
    const int64_t which = source.frequency_batch(bh / heads) * source.frequency_heads +
                          source.frequency_head(bh % heads);
    x_rows_ = WarpTokens<T>::rows_of(source, bh / heads, source.x_head(bh % heads));
    begin_tokens(first);
    if (frequencies.data == nullptr) {
      unit_ = split_own(which, shared);
    } else {
      unit_ = frequencies.units[2 * which];
      begin_frequencies<T, kRows, kSets, 16, kSplitThreads>(frequencies, which, kSets, base_);
    }
    cp_async_wait<0>();
    fence_async();
    __syncthreads();
  }

  // What sums of products are multiplied with to be angles.
  __device__ __forceinline__ float unit() const { return unit_; }

  // Takes the tokens that were copied, and begins to copy those from `next` on, if it is not
  // negative. No product may be under way.
  __device__ __forceinline__ void take_tokens(int next) {
    tokens_.wait();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) tokens_.load(slice, x_[slice]);
    __syncwarp();  // no lane reads what others are copied to
    if (next >= 0) begin_tokens(next);
  }
  // Begins the angles of a step: [set][tile of 8 frequencies][4].
  __device__ __forceinline__ void begin(int step, float (&angles)[kCount]) const {
    const uint32_t w = unknown_to_compiler(base_) + step * (2 * kCount * 128);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      begin_angles<T>(x_[slice], w + slice * (2 * kNumberBytes), kNumberBytes, slice > 0, angles);
    }
    wgmma_commit();
  }

 private:
  // The numbers of the head's frequencies, in the order that begin_frequencies() leaves. Returns
  // their unit.
  __device__ __forceinline__ float split_own(int64_t which, Shared<unsigned char> shared) const {
    const HeadFrequencies head(source_, which);
    float scale = 1;
    if constexpr (std::is_same_v<T, Half>) {
      scale =
          fitting_power(head.template largest<kSplitThreads>(kSets, shared_cast<float>(shared)));
      __syncthreads();  // it lies where numbers will
    }
#pragma unroll 2
    for (int index = threadIdx.x; index < kSlices * 8 * kRows; index += kSplitThreads) {
      const int row = index % kRows, chunk = index / kRows % 8, slice = index / kRows / 8;
      const int m = row / (16 * kSets) * 16 + frequency_of_row(row % 16);
      float w[8];
      uint4 numbers[2];
      head.load(row / 16 % kSets, m, slice * kBoxDimensions + chunk * 8, w);
      split_eight<T>(w, scale, numbers);
#pragma unroll
      for (int number = 0; number < 2; ++number) {
        store_vector(shared + ((slice * 2 + number) * kNumberBytes + swizzled(row, chunk, 128)),
                     numbers[number]);
      }
    }
    return 1 / scale;
  }
  __device__ __forceinline__ void begin_tokens(int first) const {
    tokens_.begin(source_, x_rows_, first + static_cast<int>(threadIdx.x) / 128 * kGroupRows);
  }

  const FeatureSource& source_;
  const T* x_rows_;
  uint32_t base_;
  float unit_;
  WarpTokens<T> tokens_;
  uint32_t x_[kSlices][4][4];
};

template <typename T, int kSets, int kWidth, FeatureForm kForm, int kSlices>
__global__ void __launch_bounds__(kSplitThreads, 2) hopper_feature_kernel(FeatureWork work) {
#if IKATTN_WARPGROUP_CODE
  using Steps = AngleSteps<T, kSets, kWidth, kSlices>;
  const Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const FeatureShare share =
      FeatureShare::take<kForm == FeatureForm::kInt8>(work.order, shared_cast<unsigned>(shared));
  const FeatureSource& source = work.both.sides[share.is_key ? 0 : 1].source;
  const FeatureRows& rows = work.both.sides[share.is_key ? 0 : 1].rows;
  const TileRange range(source.N, share.range, work.tiles_each);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (!prepare_share<T, kForm>(work, share, rows, range, warp)) return;
  const int end = static_cast<int>(min(int64_t{range.end} * kSplitTokens, source.N));
  int first = range.first * kSplitTokens;
  if (first >= end) return;  // the whole block
  Steps steps(source, work.frequencies, share.bh, first, shared);
  const auto behind = [&](int tokens) { return first + tokens < end ? first + tokens : -1; };
  float even[Steps::kCount], odd[Steps::kCount];
  steps.take_tokens(behind(Steps::kTokens));
  steps.begin(0, even);
#pragma unroll 1
  for (; first < end; first += Steps::kTokens) {
    const int own = first + warp * 16;
    const bool has_tokens = own < source.N;  // the whole warp
    WarpFeatures<kSets, true, kWidth, kForm, 1> features(rows, share.bh, has_tokens ? own : 0,
                                                         source.N);
    __syncwarp();  // lanes come to the products together
    const auto store = [&](int step, const float (&angles)[Steps::kCount]) {
      if (!has_tokens) return;
      features.store(16 * step, static_cast<int>(source.M), steps.unit(),
                     [&](int, int set, int j, int i) { return angles[(set * 2 + j) * 4 + i]; });
    };
#pragma unroll 1
    for (int step = 0; step < Steps::kSteps; step += 2) {
      wgmma_wait<0>();
      sums_are_there(even);
      steps.begin(step + 1, odd);
      store(step, even);
      wgmma_wait<0>();
      sums_are_there(odd);
      const bool is_last = step + 2 == Steps::kSteps;
      // Behind the last tokens these are taken again, and nobody looks at their angles.
      if (is_last && behind(Steps::kTokens) >= 0) {
        steps.take_tokens(behind(2 * Steps::kTokens));
      }
      steps.begin(is_last ? 0 : step + 2, even);
      store(step + 1, odd);
    }
    if (has_tokens) features.finish();
  }
  wgmma_wait<0>();
#else
  trap_without_warpgroups(work);
#endif
}

template <typename T, int kSets, int kWidth, FeatureForm kForm>
const char* queue(const FeatureWork& work, Stream stream) {
  const auto queue_slices = [&]<int kSlices>() {
    return launch(hopper_feature_kernel<T, kSets, kWidth, kForm, kSlices>,
                  dim3(work.order.blocks()), dim3(kSplitThreads),
                  AngleSteps<T, kSets, kWidth, kSlices>::kBytes, stream, work);
  };
  return work.frequencies.slices == 1 ? queue_slices.template operator()<1>()
                                      : queue_slices.template operator()<2>();
}

}  // namespace

bool goes_to_warpgroups(const AngleOperands& operands) {
  const FeatureSource& queries = operands.queries;
  return has_warpgroups() && queries.x.type != ElementType::kFloat32 &&
         padded_columns(2 * queries.M) <= 128 && operands.split.slices <= kMostSlices &&
         std::max(queries.N, operands.keys.N) <= kMostTokens;
}

const char* features_by_warpgroups(const FeatureWork& work, FeatureForm form, Stream stream) {
  using enum FeatureForm;
  return launch_turns(work.both.sides[0].source, [&]<typename T, int kSets>() -> const char* {
    if constexpr (sizeof(T) == 4) {
      return "tokens of float32 have no kernel here";
    } else {
      if (work.both.sides[0].rows.width == 64) return queue<T, kSets, 64, kHalf>(work, stream);
      if constexpr (!std::is_same_v<T, Half>) {
        if (form == kInt8) return queue<T, kSets, 128, kInt8>(work, stream);
        if (form == kBoth) return queue<T, kSets, 128, kBoth>(work, stream);
      }
      return queue<T, kSets, 128, kHalf>(work, stream);
    }
  });
}

}  // namespace ikattn::cuda
