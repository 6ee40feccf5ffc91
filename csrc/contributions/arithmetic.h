// Operations whose results on the CPU have the same bits for every number of threads. torch's
// products of matrices, sums over columns or over everything, and the backward of softmax have not,
// and a map, or a gradient, must not depend on where it was computed. Elsewhere they are torch's.
#pragma once

#include <ATen/core/Tensor.h>

namespace ikattn {

// The operations of the maps, with and without a graph.
struct Arithmetic {
  // Multiplies a [.., M, K] by b [.., K, N], with the same leading axes, at most two, or b with
  // none; both of one type, float32 or float64.
  at::Tensor (*product)(const at::Tensor& a, const at::Tensor& b);
  at::Tensor (*softmax)(const at::Tensor& logits);  // over the last axis
  // Broadcasts x to these sizes.
  at::Tensor (*broadcast)(const at::Tensor& x, at::IntArrayRef sizes);
};

extern const Arithmetic kTorchArithmetic;  // torch's own, on every kind of tensor
extern const Arithmetic kArithmetic;       // without a graph
extern const Arithmetic kGraphArithmetic;  // with one, of the first order

// Computes c [M, N] = a b, or with `accumulate` adds it. Without a graph. On the CPU also with up
// to two leading axes, and with a and b of another type than c.
void multiply_into(at::Tensor& c, const at::Tensor& a, const at::Tensor& b, bool accumulate);

// Sums x over the axes that have one element in `sizes`, or none. Without a graph.
at::Tensor summed_to(const at::Tensor& x, at::IntArrayRef sizes);

}  // namespace ikattn
