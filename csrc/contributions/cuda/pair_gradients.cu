// The way back from |R_j a_ij|: to the weights, and to the keys as sums of a_ij a_ij^T. A warp is a
// block, and owns 32 keys and a share of the rows; the shares' sums are added up in order.
#include "contributions/cuda/pairs.h"

namespace ikattn::cuda {
namespace {

// Returns the rows of a share: there are at most 16 shares, of 64 rows or more.
int64_t rows_of_share(const PairGradientParams& params) {
  const int64_t rows = (params.rows + 15) / 16;
  return rows < 64 ? 64 : (rows + 3) / 4 * 4;
}
int64_t shares_of(const PairGradientParams& params) {
  const int64_t each = rows_of_share(params);
  return (params.rows + each - 1) / each;
}
// Returns the elements of the factors of one variant.
__host__ __device__ int64_t factor_elements(const PairGradientParams& params) {
  const int64_t blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  return params.B * blocks * triangle(params.H) * kFactorBlock;
}

// Key of a lane, and the rows of its warp's share.
struct Lane {
  int64_t b, j, share, first, end;
  int64_t place;  // index of the key, in factors and outer products
  bool exists;
};

__device__ __forceinline__ Lane lane_of(const PairGradientParams& params, int64_t share_rows) {
  const int64_t key_blocks = (params.S + 31) / 32;
  int64_t index = blockIdx.x;
  Lane lane;
  lane.j = index % key_blocks * 32 + threadIdx.x;
  index /= key_blocks;
  lane.b = index % params.B;
  lane.share = index / params.B;
  lane.first = lane.share * share_rows;
  lane.end = min(params.rows, lane.first + share_rows);
  const int64_t blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  lane.place = (lane.b * blocks + lane.j / kFactorBlock) * triangle(params.H) * kFactorBlock +
               lane.j % kFactorBlock;
  lane.exists = lane.j < params.S;
  return lane;
}

__device__ __forceinline__ const double* factors_of(const PairGradientParams& params, int variant,
                                                    const Lane& lane) {
  return static_cast<const double*>(params.factors[variant]) + lane.place;
}

// Computes R a of some queries by rows of the triangle, and the largest element of each.
template <int kRows>
__device__ __forceinline__ void multiply_factor(const double* factors, int64_t H,
                                                Shared<const double> own,
                                                Shared<double> sums_of_rows,
                                                double (&largest)[kRows]) {
  for (int64_t h = 0; h < H; ++h) {
    double sums[kRows] = {};
    for (int64_t k = h; k < H; ++k, factors += kFactorBlock) {
      const double factor = *factors;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        const double weight = own[(k * kRows + m) * 32];
        sums[m] += factor * weight;
      }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      sums_of_rows[(h * kRows + m) * 32] = sums[m];
      const double size = sums[m] < 0.0 ? -sums[m] : sums[m];
      if (size > largest[m] || size != size) largest[m] = size;  // NaN stays
    }
  }
}

// Replaces R a by R a / n in pairs that have a norm; makes their gradient g, and g / n. Scaled by
// the largest element, so that squares stay in range.
template <int kRows>
__device__ __forceinline__ void make_directions(const PairGradientParams& params, int variant,
                                                const Lane& lane, int64_t i0,
                                                const double (&largest)[kRows],
                                                Shared<double> directions, bool (&lives)[kRows],
                                                double (&gradient)[kRows], double (&slope)[kRows]) {
  constexpr double kSmallest = 2.3e-308;  // the smallest number that has an inverse
  const int64_t* stride = params.norms[variant].stride;
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    lives[m] = lives[m] && !(largest[m] < kSmallest);
    const double scale = lives[m] ? 1.0 / largest[m] : 0.0;
    double square = 0;
    for (int64_t h = 0; h < params.H; ++h) {
      const double scaled = directions[(h * kRows + m) * 32] * scale;
      square += scaled * scaled;
    }
    const double inverse = lives[m] ? 1.0 / sqrt(square) : 0.0;
    for (int64_t h = 0; h < params.H; ++h) {
      const double direction = directions[(h * kRows + m) * 32] * scale * inverse;
      directions[(h * kRows + m) * 32] = lives[m] ? direction : 0.0;
    }
    gradient[m] = 0;
    if (lives[m]) {
      gradient[m] = load_element<double>(
          params.norms[variant], lane.b * stride[0] + (i0 + m) * stride[1] + lane.j * stride[2]);
    }
    slope[m] = lives[m] ? gradient[m] * scale * inverse : 0.0;
  }
}

// Adds gradients of the weights: g R^T (R a / n), by columns of the triangle.
template <int kRows>
__device__ __forceinline__ void add_weight_gradients(const PairGradientParams& params, int variant,
                                                     const Lane& lane, int64_t i0,
                                                     Shared<const double> directions,
                                                     const bool (&lives)[kRows],
                                                     const double (&gradient)[kRows]) {
  const Array& grad_weights = params.grad_weights;
  const int64_t* stride = grad_weights.stride;
  for (int64_t k = 0; k < params.H; ++k) {
    double sums[kRows] = {};
    // R_0k, then down the column
    const double* factors = factors_of(params, variant, lane) + k * kFactorBlock;
    for (int64_t h = 0; h <= k; ++h) {
      const double factor = *factors;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        const double direction = directions[(h * kRows + m) * 32];
        sums[m] += factor * direction;
      }
      factors += (params.H - h - 1) * kFactorBlock;
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (i0 + m >= lane.end) continue;
      const int64_t offset =
          lane.b * stride[0] + k * stride[1] + (i0 + m) * stride[2] + lane.j * stride[3];
      const double before = variant == 0 ? 0.0 : load_element<double>(grad_weights, offset);
      // A key without weight may hold NaN.
      const double here = lives[m] ? gradient[m] * sums[m] : 0.0;
      store_element<double>(grad_weights, offset, before + here);
    }
  }
}

// Adds the outer products a a^T, times g / n, to the share's; writes the first ones.
template <int kRows>
__device__ __forceinline__ void add_outer(int64_t H, Shared<const double> own,
                                          const double (&slope)[kRows], bool is_first,
                                          double* outer) {
  for (int64_t h = 0; h < H; ++h) {
    double scaled[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const double weight = own[(h * kRows + m) * 32];
      scaled[m] = slope[m] * weight;
    }
    for (int64_t k = h; k < H; ++k, outer += kFactorBlock) {
      double sum = is_first ? 0.0 : *outer;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        const double weight = own[(k * kRows + m) * 32];
        sum += scaled[m] * weight;
      }
      *outer = sum;
    }
  }
}

// parts [share][B, blocks, triangle(H), 64]: the outer products of this variant; nullptr: not
// wanted. Shared memory: two arrays as in load_own_weights(), the second of R a / |R a|.
template <int kRows>
__global__ void __launch_bounds__(32, 8)
    pair_gradient_kernel(PairGradientParams params, int variant, int64_t share_rows,
                         double* parts) {
  const Lane lane = lane_of(params, share_rows);
  Shared<double> own = dynamic_shared<double>() + threadIdx.x;
  Shared<double> directions = own + params.H * kRows * 32;
  const bool key_visible = lane.exists && !is_padding(params.key_padding, lane.b, lane.j);
  for (int64_t i0 = lane.first; i0 < lane.end; i0 += kRows) {
    bool lives[kRows];
    load_own_weights<kRows>(params, lane.b, i0, lane.end, lane.j, key_visible, own, lives);
    if (!lane.exists) continue;  // no warp operation follows
    double largest[kRows] = {}, gradient[kRows], slope[kRows];
    multiply_factor<kRows>(factors_of(params, variant, lane), params.H, own, directions, largest);
    make_directions<kRows>(params, variant, lane, i0, largest, directions, lives, gradient, slope);
    if (params.grad_weights.type != ElementType::kNone) {
      add_weight_gradients<kRows>(params, variant, lane, i0, directions, lives, gradient);
    }
    if (parts == nullptr) continue;
    add_outer<kRows>(params.H, own, slope, i0 == lane.first,
                     parts + lane.share * factor_elements(params) + lane.place);
  }
}

// outer += the parts, share after share.
__global__ void __launch_bounds__(128, 2)
    add_shares_kernel(PairGradientParams params, const double* parts, int64_t shares,
                      double* outer) {
  const int64_t index = int64_t{blockIdx.x} * 128 + threadIdx.x, count = factor_elements(params);
  if (index >= count) return;
  const int64_t blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  const int64_t block = index / (triangle(params.H) * kFactorBlock) % blocks;
  if (block * kFactorBlock + index % kFactorBlock >= params.S) return;  // no key, no part
  double sum = outer[index];
  for (int64_t share = 0; share < shares; ++share) sum += parts[share * count + index];
  outer[index] = sum;
}

}  // namespace

int64_t pair_gradient_scratch(const PairGradientParams& params) {
  bool wanted = false;
  for (const void* outer : params.outer) wanted = wanted || outer != nullptr;
  return wanted ? shares_of(params) * factor_elements(params) : 0;
}

namespace {

template <int kRows>
const char* launch_gradients(const PairGradientParams& params, double* scratch, Stream stream) {
  const int64_t bytes = shared_of_warp<double>(params.H, kRows, 2);
  const int64_t shares = shares_of(params);
  const auto blocks = static_cast<unsigned>(shares * params.B * ((params.S + 31) / 32));
  for (int variant = 0; variant < params.variants; ++variant) {
    double* outer = params.outer[variant];
    double* parts = outer == nullptr ? nullptr : scratch;
    if (const char* error = launch(pair_gradient_kernel<kRows>, dim3(blocks), dim3(32), bytes,
                                   stream, params, variant, rows_of_share(params), parts)) {
      return error;
    }
    if (outer == nullptr) continue;
    const double* read = parts;
    const auto sums = static_cast<unsigned>((factor_elements(params) + 127) / 128);
    if (const char* error = launch(add_shares_kernel, dim3(sums), dim3(128), 0, stream, params,
                                   read, shares, outer)) {
      return error;
    }
  }
  return nullptr;
}

}  // namespace

const char* pair_gradients(const PairGradientParams& params, double* scratch, Stream stream) {
  if (shared_of_warp<double>(params.H, 4, 2) <= kMostShared) {
    return launch_gradients<4>(params, scratch, stream);
  }
  if (shared_of_warp<double>(params.H, 1, 2) <= kMostShared) {
    return launch_gradients<1>(params, scratch, stream);
  }
  return "there must be at most 192 heads for gradients";
}

}  // namespace ikattn::cuda
