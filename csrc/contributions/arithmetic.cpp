#include "contributions/arithmetic.h"

#include <ATen/ATen.h>

#include "contributions/cpu/kernel.h"
#include "support/autograd.h"
#include "support/cpu_glue.h"

namespace ikattn {
namespace {

// Computes c [.., M, N], of at most four axes.
void multiply_on_cpu(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                     bool accumulate) {
  if (c.numel() == 0) return;
  const auto axis = [&](int64_t from_last) {
    return c.dim() >= from_last ? c.size(-from_last) : int64_t{1};
  };
  const int64_t outer = axis(4), inner = axis(3);
  const int64_t rows = axis(2), columns = axis(1), depth = a.size(-1);
  ProductParams params;
  params.sizes = {outer, inner, rows, columns, depth};
  params.a = array_of(a, {outer, inner, rows, depth});
  params.b = array_of(b, {outer, inner, depth, columns});
  params.c = array_of(c, {outer, inner, rows, columns});
  params.accumulate = accumulate;
  const double work = static_cast<double>(c.numel()) * static_cast<double>(depth);
  IKATTN_KERNELS(contribution_kernels)
      .multiply[compute_index(c)](params, TorchExecutor("contributions", work));
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu()) return at::matmul(a, b);
  std::vector<int64_t> sizes = a.sizes().vec();
  sizes.back() = b.size(-1);
  const at::Tensor result = at::empty(sizes, a.options());
  const bool shared = b.dim() < a.dim();  // then all rows are those of one matrix
  multiply_on_cpu(shared ? result.flatten(0, -2) : result, shared ? a.flatten(0, -2) : a, b, false);
  return result;
}

at::Tensor softmax(const at::Tensor& logits) { return at::softmax(logits, -1); }

at::Tensor broadcast(const at::Tensor& x, at::IntArrayRef) { return x; }

// --- With a graph, of the first order

// Fails where a second derivative would be lost silently.
void assert_first_order() { TORCH_INTERNAL_ASSERT(!at::GradMode::is_enabled()); }

struct ProductFunction : torch::autograd::Function<ProductFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b) {
    ctx->save_for_backward({a, b});
    return product(a, b);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    assert_first_order();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &a = saved[0], &b = saved[1], &incoming = grads[0];
    variable_list result(2);
    if (!incoming.defined()) return result;
    if (ctx->needs_input_grad(0)) result[0] = product(incoming, b.mT());
    if (ctx->needs_input_grad(1)) {
      const bool shared = b.dim() < a.dim();
      const auto rows_of_all = [&](const at::Tensor& x) { return shared ? x.flatten(0, -2) : x; };
      result[1] = product(rows_of_all(a).mT(), rows_of_all(incoming));
    }
    return result;
  }
};

struct SoftmaxFunction : torch::autograd::Function<SoftmaxFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits) {
    const at::Tensor result = softmax(logits);
    ctx->save_for_backward({result});
    return result;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    assert_first_order();
    const at::Tensor result = ctx->get_saved_variables()[0], &incoming = grads[0];
    if (!incoming.defined()) return {at::Tensor()};
    std::vector<int64_t> rows = result.sizes().vec();
    rows.back() = 1;
    at::Tensor products = incoming * result;
    const at::Tensor sums = summed_to(products, rows);
    return {at::sub_out(products, incoming, sums).mul_(result)};  // large: in the same memory
  }
};

struct BroadcastFunction : torch::autograd::Function<BroadcastFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, at::IntArrayRef sizes) {
    ctx->saved_data["sizes"] = x.sizes().vec();
    return x.expand(sizes);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    assert_first_order();
    const std::vector<int64_t> sizes = ctx->saved_data["sizes"].toIntVector();
    return {grads[0].defined() ? summed_to(grads[0], sizes) : at::Tensor(), at::Tensor()};
  }
};

}  // namespace

const Arithmetic kTorchArithmetic = {
    [](const at::Tensor& a, const at::Tensor& b) { return at::matmul(a, b); }, softmax, broadcast};
const Arithmetic kArithmetic = {product, softmax, broadcast};
const Arithmetic kGraphArithmetic = {
    [](const at::Tensor& a, const at::Tensor& b) { return ProductFunction::apply(a, b); },
    [](const at::Tensor& logits) { return SoftmaxFunction::apply(logits); },
    [](const at::Tensor& x, at::IntArrayRef sizes) { return BroadcastFunction::apply(x, sizes); }};

void multiply_into(at::Tensor& c, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  if (c.is_cpu()) {
    multiply_on_cpu(c, a, b, accumulate);
  } else if (accumulate) {
    c.addmm_(a, b);
  } else {
    at::mm_out(c, a, b);
  }
}

at::Tensor summed_to(const at::Tensor& x, at::IntArrayRef sizes) {
  if (!x.is_cpu()) return at::sum_to(x, sizes);
  const int64_t leading = x.dim() - static_cast<int64_t>(sizes.size());
  at::Tensor sum = x;
  for (int64_t axis = 0; axis < x.dim(); ++axis) {
    const int64_t count = x.size(axis);
    if (count == 1 || (axis >= leading && sizes[axis - leading] == count)) continue;
    std::vector<int64_t> shape = sum.sizes().vec();
    const int64_t before = c10::multiply_integers(shape.begin(), shape.begin() + axis);
    const int64_t after = c10::multiply_integers(shape.begin() + axis + 1, shape.end());
    // Products with ones sum the rows where these are contiguous, else the columns.
    sum = after == 1 ? product(sum.reshape({before, count}), at::ones({count, 1}, x.options()))
                     : product(at::ones({1, count}, x.options()).expand({before, 1, count}),
                               sum.reshape({before, count, after}));
    shape[axis] = 1;
    sum = sum.view(shape);
  }
  return sum.view(sizes);
}

}  // namespace ikattn
