// The table of entry points; see kernels.h.
#include "attention/cuda/kernels.h"
#include "attention/cuda/operands/tokens.h"

namespace ikattn::cuda {

template <typename T>
const char* attention_backward(const AttentionBackwardParams&, const DeviceExecutor&);
template <typename T>
const char* attention_weights(const WeightsParams&, const DeviceExecutor&);
template <typename T>
const char* features(const FeaturesParams&, bool backward, const DeviceExecutor&);

const AttentionKernels attention_kernels = {
    {attention_forward<float>, attention_forward<double>},
    {attention_backward<float>, attention_backward<double>},
    {attention_weights<float>, attention_weights<double>},
    {features<float>, features<double>},
};

}  // namespace ikattn::cuda
