// Distances between a layer's outputs and the contributions of each token, |y_i - y_ij|. The
// vectors are sums over heads, which are computed, added up and not stored.
//
// A task computes a block of queries with all keys, whose heads' vectors stay in a near cache while
// four rows at a time use them.
#pragma once

#include "contributions/params.h"
#include "support/cpu/elements.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int kDistanceRows = 4;        // at a time
constexpr int64_t kDistanceBlock = 64;  // of a task

template <typename T>
inline Vec<T> size_of(Vec<T> x, bool is_squared) {
  return is_squared ? x * x : (Vec<T>)((Bits<T>)x & ~(Bits<T>)broadcast(T(-0.0)));
}
template <typename T>
inline T size_of_one(T x, bool is_squared) {
  return is_squared ? x * x : x < 0 ? -x : x;
}

// Computes totals[r], the sum over elements of |rows[r] - sum_h weights[h][r] heads[h]|, [D] each.
template <typename T, bool kSquared>
void sum_distances(int64_t H, int64_t D, const T* weights, const T* heads,
                   const T* const (&rows)[kDistanceRows], T (&totals)[kDistanceRows]) {
  constexpr int kVectors = 2;
  constexpr int64_t kStep = kVectors * kLanes<T>;
  Vec<T> sums[kDistanceRows] = {};
  int64_t d = 0;
  for (; d + kStep <= D; d += kStep) {
    Vec<T> rest[kDistanceRows][kVectors];
    for (int r = 0; r < kDistanceRows; ++r) {
      for (int v = 0; v < kVectors; ++v) rest[r][v] = load(rows[r] + d + v * kLanes<T>);
    }
    for (int64_t h = 0; h < H; ++h) {
      const T* head = heads + h * D + d;
      const T* of_head = weights + h * kDistanceRows;
      Vec<T> vectors[kVectors];
      for (int v = 0; v < kVectors; ++v) vectors[v] = load(head + v * kLanes<T>);
      for (int r = 0; r < kDistanceRows; ++r) {
        const Vec<T> weight = broadcast(of_head[r]);
        for (int v = 0; v < kVectors; ++v) rest[r][v] -= weight * vectors[v];
      }
    }
    for (int r = 0; r < kDistanceRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sums[r] += size_of<T>(rest[r][v], kSquared);
    }
  }
  for (int r = 0; r < kDistanceRows; ++r) totals[r] = sum_of_lanes<T>(sums[r]);
  for (; d < D; ++d) {
    for (int r = 0; r < kDistanceRows; ++r) {
      T rest = rows[r][d];
      for (int64_t h = 0; h < H; ++h) rest -= weights[h * kDistanceRows + r] * heads[h * D + d];
      totals[r] += size_of_one(rest, kSquared);
    }
  }
}

template <typename T>
void distances(const DistanceParams& params, const Executor& executor) {
  const int64_t H = params.H, S = params.S, T_ = params.L, D = params.D;
  const int64_t blocks = ceil_div(T_, kDistanceBlock);
  const auto* all_weights = static_cast<const T*>(params.weights);
  const auto* all_heads = static_cast<const T*>(params.heads);
  const auto* output = static_cast<const T*>(params.output);
  const auto* residual = static_cast<const T*>(params.residual);
  auto* distances = static_cast<T*>(params.distances);
  Workspace measure;
  const auto take = [&](Workspace& workspace) {
    T* weights = workspace.take<T>(H * kDistanceRows);
    return std::pair(weights, workspace.take<T>(D));
  };
  take(measure);
  char* memory =
      static_cast<char*>(executor.allocate(executor.owner, measure.bytes() * executor.threads));
  parallel(executor, params.B * blocks, [&](int64_t task, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    const auto [weights, without_own] = take(workspace);
    const int64_t b = task / blocks, first = task % blocks * kDistanceBlock;
    const int64_t end = min_of(first + kDistanceBlock, T_);
    for (int64_t j = 0; j < S; ++j) {
      const T* heads = all_heads + (b * S + j) * H * D;
      for (int64_t i = first; i < end; i += kDistanceRows) {
        const T* rows[kDistanceRows];
        for (int r = 0; r < kDistanceRows; ++r) {
          const int64_t row = min_of(i + r, end - 1);
          rows[r] = output + (b * T_ + row) * D;
          for (int64_t h = 0; h < H; ++h) {
            weights[h * kDistanceRows + r] = all_weights[((b * H + h) * T_ + row) * S + j];
          }
          if (row + params.diagonal != j) continue;
          const T* own = residual + (b * T_ + row) * D;
          for (int64_t d = 0; d < D; ++d) without_own[d] = rows[r][d] - own[d];
          rows[r] = without_own;
        }
        T totals[kDistanceRows];
        if (params.is_squared) {
          sum_distances<T, true>(H, D, weights, heads, rows, totals);
        } else {
          sum_distances<T, false>(H, D, weights, heads, rows, totals);
        }
        for (int r = 0; r < kDistanceRows && i + r < end; ++r) {
          distances[(b * T_ + i + r) * S + j] = totals[r];
        }
      }
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
