// CPU: threads, the choice of instruction set, edges by source.
#include "edge_attention/glue.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "edge_attention/cpu/kernel.h"
#include "support/cpu_glue.h"

namespace ikattn {
namespace {

template <typename T>
const auto& kernels() {
  const EdgeAttentionKernels& table = IKATTN_KERNELS(edge_attention_kernels);
  if constexpr (sizeof(T) == 8) {
    return table.of_double;
  } else {
    return table.of_float;
  }
}

// Returns the multiply-adds of one pass over the edges.
template <typename Params>
double work_of(const Params& params) {
  return static_cast<double>(params.E) * static_cast<double>(params.H) *
         static_cast<double>(params.F + params.d_v);
}

struct Cpu {
  static void check(const char* function, const at::Tensor& rowptr, const at::Tensor& col,
                    int64_t N_k) {
    check_edges(function, rowptr, col, N_k);
  }
  static BySource by_source(const at::Tensor& rowptr, const at::Tensor& col, int64_t N_k) {
    const int64_t E = col.size(0), N_q = rowptr.size(0) - 1;
    const auto options = col.options();
    BySource result{at::zeros({N_k + 1}, options), at::empty({E}, options),
                    at::empty({E}, options)};
    const int64_t *end = read<int64_t>(rowptr), *source = read<int64_t>(col);
    int64_t* ends = write<int64_t>(result.colptr);
    int64_t *edges = write<int64_t>(result.edges), *targets = write<int64_t>(result.targets);
    // ends[j + 1] changes from the number of edges of j to their begin, and then to their end.
    for (int64_t e = 0; e < E; ++e) ++ends[source[e] + 1];
    int64_t begin = 0;
    for (int64_t j = 0; j < N_k; ++j) begin += std::exchange(ends[j + 1], begin);
    for (int64_t i = 0; i < N_q; ++i) {
      for (int64_t e = end[i]; e < end[i + 1]; ++e) {
        const int64_t place = ends[source[e] + 1]++;
        edges[place] = e;
        targets[place] = i;
      }
    }
    return result;
  }
  template <typename T>
  static void forward(const EdgeForwardParams<T>& params, const at::Tensor&) {
    kernels<T>().forward(params, TorchExecutor(kFromEdgeFeatures, work_of(params)));
  }
  template <typename T>
  static void query_gradients(const EdgeQueryGradientParams<T>& params, const at::Tensor&) {
    kernels<T>().query_gradients(params, TorchExecutor(kEdgeQueryGradients, 2 * work_of(params)));
  }
  template <typename T>
  static void key_gradients(const EdgeKeyGradientParams<T>& params, const at::Tensor&) {
    kernels<T>().key_gradients(params, TorchExecutor(kEdgeKeyGradients, work_of(params)));
  }
};

TORCH_LIBRARY_IMPL(ikattn, CPU, m) { EdgeOperators<Cpu>::register_in(m); }

}  // namespace
}  // namespace ikattn
