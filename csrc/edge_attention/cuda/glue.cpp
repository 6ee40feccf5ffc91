// CUDA: the stream, working memory, edges by source. Built where torch has CUDA.
#include "support/cuda/glue.h"

#include <torch/library.h>

#include "edge_attention/cuda/kernels.h"
#include "edge_attention/glue.h"
#include "edge_attention/reference.h"

namespace ikattn {
namespace {

template <typename T>
const auto& kernels() {
  if constexpr (sizeof(T) == 8) {
    return cuda::edge_kernels_of_double;
  } else {
    return cuda::edge_kernels_of_float;
  }
}

// Working memory for partial sums of rows that are cut.
template <typename T>
struct Scratch {
  double* numbers;
  T* values;

  Scratch(cuda::Call& call, int64_t E, int64_t H, int64_t width) {
    const cuda::EdgeScratch sizes = cuda::edge_scratch(E, H, width);
    numbers = static_cast<double*>(call.allocate(sizes.numbers * int64_t{sizeof(double)}));
    values = static_cast<T*>(call.allocate(sizes.values * static_cast<int64_t>(sizeof(T))));
  }
};

struct Cuda {
  static void check(const char*, const at::Tensor&, const at::Tensor&, int64_t) {}  // would wait

  static BySource by_source(const at::Tensor& rowptr, const at::Tensor& col, int64_t N_k) {
    const auto [sorted, edges] = at::sort(col, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    const at::Tensor nodes = at::arange(N_k + 1, col.options());
    return {at::searchsorted(sorted, nodes), edges, targets_of(rowptr, col).index_select(0, edges)};
  }
  template <typename T>
  static void forward(const EdgeForwardParams<T>& params, const at::Tensor& like) {
    cuda::Call call(kFromEdgeFeatures, like);
    const Scratch<T> scratch(call, params.E, params.H, params.d_v);
    call.check(kernels<T>().forward(params, scratch.numbers, scratch.values, call.stream()));
  }
  template <typename T>
  static void query_gradients(const EdgeQueryGradientParams<T>& params, const at::Tensor& like) {
    cuda::Call call(kEdgeQueryGradients, like);
    auto* mean = static_cast<double*>(
        call.allocate(params.N_q * params.H * static_cast<int64_t>(sizeof(double))));
    const Scratch<T> scratch(call, params.E, params.H, params.F);
    call.check(
        kernels<T>().query_gradients(params, mean, scratch.numbers, scratch.values, call.stream()));
  }
  template <typename T>
  static void key_gradients(const EdgeKeyGradientParams<T>& params, const at::Tensor& like) {
    cuda::Call call(kEdgeKeyGradients, like);
    const Scratch<T> scratch(call, params.E, params.H, params.F + params.d_v);
    call.check(kernels<T>().key_gradients(params, scratch.numbers, scratch.values, call.stream()));
  }
};

TORCH_LIBRARY_IMPL(ikattn, IKATTN_CUDA_KEY, m) { EdgeOperators<Cuda>::register_in(m); }

}  // namespace
}  // namespace ikattn
