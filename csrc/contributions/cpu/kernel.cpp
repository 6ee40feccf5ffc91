// The kernels of one instruction set, which IKATTN_ISA names; compiled once for each. No torch
// header.
#include "contributions/cpu/kernel.h"

#include "contributions/cpu/distances.h"
#include "contributions/cpu/factors.h"
#include "contributions/cpu/gram_factors.h"
#include "contributions/cpu/pair_gradients.h"
#include "contributions/cpu/pairs.h"
#include "contributions/cpu/products.h"
#include "contributions/cpu/streamed_pairs.h"
#include "contributions/cpu/value_norms.h"

namespace ikattn::IKATTN_ISA {

extern const ContributionKernels contribution_kernels;
const ContributionKernels contribution_kernels = {
    {gram_factors, token_factors},
    {pair_norms<float>, pair_norms<double>},
    {streamed_norms<float>, streamed_norms<double>},
    pair_gradients,
    {multiply<float>, multiply<double>},
    value_norms,
    {distances<float>, distances<double>},
};

}  // namespace ikattn::IKATTN_ISA
