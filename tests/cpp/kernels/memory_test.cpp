// Working memory of the attention operators' CUDA kernels, by the bytes they ask for.
#include "kernels/half_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

// Forward and backward.
int64_t working_memory(Case c, int64_t tokens) {
  c.L = c.S = tokens;
  Call call(c);
  Memory memory;
  AttentionBackwardParams params;
  call.set(params);
  Memory results;
  const int64_t B = c.B, H = c.H, G = c.key_heads();
  params.output = make(results, c.type, {B, H, c.L, c.d_v}).array;
  params.log_normalizer = make(results, ElementType::kFloat64, {B, H, c.L}).array;
  const auto& kernels = cuda::attention_kernels;
  const int wide = c.type == ElementType::kFloat64 ? 1 : 0;
  EXPECT_STREQ(kernels.forward[wide](params, device_executor(memory)), nullptr);
  params.grad_output = call.grad_output.array;
  params.grad_query = make(results, c.type, {B, H, c.L, c.d}).array;
  params.grad_key = make(results, c.type, {B, G, c.S, c.d}).array;
  params.grad_value = make(results, c.type, {B, G, c.S, c.d_v}).array;
  EXPECT_STREQ(kernels.backward[wide](params, device_executor(memory)), nullptr);
  return memory.taken();
}

// Linear in the length: nothing has an element for every pair.
TEST(WorkingMemoryOnDevice, IsThatOfTokens) {
  const std::vector<Case> cases = cases_of(R"(
folded one_head d=8 d_v=32 M=32
causal one_head d=8 d_v=32 M=32 causal
general one_head d=8 d_v=32 M=32 mask=per_pair dropout=0.3
wide one_head d=8 d_v=136 M=66
)");
  for (const bool warpgroups : {false, true}) {
    interpreter::set_warpgroups(warpgroups);
    for (const Case& c : cases) {
      for (const ElementType type :
           {ElementType::kFloat64, ElementType::kFloat32, ElementType::kBFloat16}) {
        if (warpgroups && type != ElementType::kBFloat16) continue;
        // Kernels for float64 and float32 are the same for all cases.
        if (type != ElementType::kBFloat16 && c.name != "general" && !runs_everything()) continue;
        Case typed = c;
        typed.type = type;
        SCOPED_TRACE(c.name + " of " + std::to_string(size_of(type)) + " bytes");
        const auto once = static_cast<double>(working_memory(typed, 128));
        EXPECT_LE(working_memory(typed, 256), 2.05 * once);
      }
    }
  }
}

}  // namespace
}  // namespace ikattn
