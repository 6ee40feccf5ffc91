// Gradients of one side's features in one pass, where dimensions and frequencies are few.
#pragma once

#include "attention/cuda/features/gradients.h"
#include "attention/cuda/operands/feature_source.h"

namespace ikattn::cuda {

template <typename T>
bool is_narrow(const FeatureSource& source);

// Computes the gradients of a narrow source: grad_phi [B, heads, N, 2M] -> grad_x, and (+=) the
// frequencies' gradients; absent ones are left out.
template <typename T>
const char* narrow_gradients(const FeatureSource& source, const Array& grad_phi,
                             const Array& grad_x, T* grad_w1, T* grad_w2,
                             const Magnitude<T>& magnitude, const DeviceExecutor& executor);

}  // namespace ikattn::cuda
