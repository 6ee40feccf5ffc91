// Functions that CPU and GPU code share.
#pragma once

#if defined(__CUDACC__)
#define IKATTN_HOST_DEVICE __host__ __device__
#else
#define IKATTN_HOST_DEVICE
#endif
