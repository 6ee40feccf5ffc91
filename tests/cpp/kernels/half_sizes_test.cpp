// The tensor-core kernels at sizes around their tiles, of few queries and of many tokens, and in
// the shared memory that there is.
#include <tuple>
#include <utility>

#include "kernels/half_cases.h"

namespace ikattn {
namespace {

// Tokens around the edges of blocks and tiles of every kernel.
TEST(HalfSizesOnDevice, EdgesOfTiles) {
  for (const bool warpgroups : {false, true}) {
    interpreter::set_warpgroups(warpgroups);
    for (const bool causal : {false, true}) {
      for (const auto& [L, S] : {std::pair{63, 129},
                                 {64, 128},
                                 {65, 127},
                                 {127, 65},
                                 {128, 64},
                                 {129, 63},
                                 {128, 129},
                                 {129, 128}}) {
        SCOPED_TRACE(std::to_string(L) + " x " + std::to_string(S));
        Case c = one_head({.name = "edges", .L = L, .S = S, .d_v = 8, .M = 9});
        c.causal = causal;
        Call call(c = of_type(c, ElementType::kBFloat16));
        const Results truth = truth_of(call, c), got = device_results(call, c);
        expect_forward_within(call, c, got, truth);
        compare_gradients(got, truth, c, 6 * roundoff_of(c.type));
      }
    }
  }
}

// Edges of sizes matter in the general form, of wide rows, and of both, too.
TEST(HalfSizesOnDevice, EdgesOfOtherForms) {
  for (const auto& [masking, d_v, M] : {std::tuple{Masking::kFloatPerPair, 8, 9},
                                        {Masking::kNone, 127, 65},
                                        {Masking::kFloatPerPair, 129, 9}}) {
    for (const auto& [L, S] :
         {std::pair{63, 65}, {64, 64}, {65, 63}, {127, 129}, {128, 128}, {129, 127}}) {
      SCOPED_TRACE(std::to_string(L) + " x " + std::to_string(S) + " x " + std::to_string(d_v));
      Case c = one_head({.name = "edges", .L = L, .S = S, .d_v = d_v, .M = M});
      c.masking = masking;
      Call call(c = of_type(c, ElementType::kBFloat16));
      const Results truth = truth_of(call, c), got = device_results(call, c);
      expect_forward_within(call, c, got, truth);
      compare_gradients(got, truth, c, 6 * roundoff_of(c.type));
    }
  }
}

// Few queries: blocks share their keys, and what each found is combined.
TEST(HalfSizesOnDevice, SharedKeysErrByTheirRoundings) {
  interpreter::set_multiprocessors(6);
  size_t turn = 0;
  for (Case c : cases_of(R"(
few one_key_head L=3 S=1100 d_v=40
few one_key_head L=3 S=1100 d_v=40 causal magnitude=40
few one_key_head L=3 S=1100 d_v=40 mask=float dropout=0.3
few one_key_head L=3 S=1100 d_v=40 mask=bool
few one_key_head L=3 S=1100 d_v=200
few one_key_head L=3 S=1100 d_v=200 mask=float dropout=0.3
# parts of wide features are as narrow as their values
few one_key_head L=3 S=1100 d_v=40 M=80
few one_key_head L=3 S=1100 d_v=40 M=66 causal magnitude=40
few one_key_head L=3 S=1100 d_v=8 M=66 mask=float
few one_key_head L=3 S=1100 d_v=1 M=66
few one_key_head L=3 S=1100 d_v=72 M=66
few one_key_head L=3 S=1100 d_v=72
few one_key_head L=3 S=1100 d_v=64 M=66 mask=bool dropout=0.3
)")) {
    for (const ElementType type : types_in_turn(turn++)) {
      Call call(c = of_type(c, type));
      const Results truth = truth_of(call, c), got = device_results(call, c);
      expect_forward_within(call, c, got, truth);
    }
  }
}

// Rows of large offsets see nothing but the lowest numbers.
TEST(HalfSizesOnDevice, SharedKeysOfLargeOffsets) {
  interpreter::set_multiprocessors(6);
  for (const int64_t d_v : {8, 136}) {
    for (const ElementType type : types_in_turn(d_v == 8 ? 0 : 1)) {
      Case c{.name = "few", .B = 1, .L = 3, .S = 1100, .d_v = d_v, .bias = true, .lowest = true};
      c.masking = Masking::kFloatPerPair;
      c.magnitude = 4;
      Call call(c = of_type(c, type));
      const Results truth = truth_of(call, c), got = device_results(call, c);
      expect_forward_within(call, c, got, truth);
    }
  }
}

// sm_86, sm_89 and sm_120 have the least shared memory; the widest kernels of each form fit.
TEST(HalfSizesOnDevice, FitsTheLeastSharedMemory) {
  interpreter::set_shared_limit(99 * 1024);
  for (const double p : {1.5, 0.0}) {
    for (const ElementType type : kTypes) {
      Case c = one_head({.name = "powers", .L = 2, .S = 3, .d = 64, .d_v = 64, .M = 64, .p = p});
      Call call(c = of_type(c, type));
      device_results(call, c);
    }
  }
  for (const int64_t d_v : {64, 128, 256}) {
    for (const auto& [type, masking, causal] :
         {std::tuple{ElementType::kBFloat16, Masking::kNone, false},
          {ElementType::kFloat16, Masking::kNone, true},
          {ElementType::kFloat32, Masking::kNone, false},
          {ElementType::kBFloat16, Masking::kBool, false},
          {ElementType::kFloat32, Masking::kFloat, false}}) {
      Case c = one_head({.name = "wide", .L = 2, .S = 3, .d = d_v, .d_v = d_v, .M = 64});
      c.masking = masking;
      c.causal = causal;
      Call call(c = of_type(c, type));
      device_results(call, c);  // expects that nothing is refused
    }
  }
  interpreter::set_shared_limit(227 * 1024);
}

// The frequencies' gradients, of more tokens than a share. Of two keys many rows have a score near
// zero, and its gradient errs by its rounding over it.
TEST(HalfSizesOnDevice, FrequenciesOfManyTokens) {
  Case c = case_of("shares H=1 G=1 w_heads=1 L=2049 S=2 d_v=8");
  c = of_type(c, ElementType::kBFloat16);
  Call call(c);
  const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
  expect_close(got.grad_w1, truth.grad_w1, 5 * (2 * 0x1p-9 + 0x1p-10), "grad_w1");
  expect_close(got.grad_w2, truth.grad_w2, 5 * (2 * 0x1p-9 + 0x1p-10), "grad_w2");
}

}  // namespace
}  // namespace ikattn
