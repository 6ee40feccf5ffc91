// The entry points of attention on CUDA: what glue.cpp calls, with the parameters that the CPU
// kernels take.
#pragma once

#include "attention/calls/params.h"
#include "support/cuda/executor.h"
#include "support/exported.h"

namespace ikattn::cuda {

// Each queues its work and returns nullptr, or why it could not. Index 0: compute in float32; 1: in
// float64. Dropout reads its seed from params.dropout, on the device.
struct AttentionKernels {
  const char* (*forward[2])(const AttentionParams&, const DeviceExecutor&);
  const char* (*backward[2])(const AttentionBackwardParams&, const DeviceExecutor&);
  const char* (*weights[2])(const WeightsParams&, const DeviceExecutor&);
  const char* (*features[2])(const FeaturesParams&, bool backward, const DeviceExecutor&);
};

extern IKATTN_EXPORTED const AttentionKernels attention_kernels;

// keep [B, H, L, S]: what dropout keeps, from B, H, L, S, dropout_threshold and dropout.
IKATTN_EXPORTED const char* dropout_keep_mask(const AttentionParams& params, uint8_t* keep,
                                              Stream stream);

}  // namespace ikattn::cuda
