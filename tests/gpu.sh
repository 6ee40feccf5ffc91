#!/usr/bin/env bash
# What is to be run on a GPU, in this order, each step by itself: docs/cuda.md, "With a GPU".
#
#   tests/gpu.sh build programs calls suite    # some steps
#   tests/gpu.sh                               # all of them
#
# Every step's output is kept in build/gpu/STEP.log (GPU_LOGS names another folder), also of one that
# fails; the last lines say how each ended and how long it took. Python, pytest and torch are those on
# PATH, and `build` installs the package for the GPU that is here.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=${GPU_LOGS:-build/gpu}
mkdir -p "$logs"

sm90a() {
  nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Icsrc -Icsrc/include -Itests/cpp \
    "$@" -o "$logs/program" && "$logs/program"
}
sanitized() {
  local tool=$1
  shift
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
    python -m pytest -q -x "$@"
}
python_tests() { python -m pytest -q -p no:cacheprovider "$@"; }

build() { python -m pip install --no-build-isolation --no-deps . && python -m ikattn info; }
# wgmma's products, each form alone; copies by TMA and a ring of stages.
programs() {
  sm90a tests/cpp/cuda/wgmma.cu &&
    sm90a tests/cpp/cuda/copies.cu tests/cpp/simt/sample_copies.cu
}
# Streams, graphs, bits, memory, sizes; then maps.
calls() { python_tests tests/python/test_cuda_calls.py tests/python/test_cuda_contributions.py; }
suite() { python_tests tests/python/test_cuda.py tests/python/test_fast_path.py; }
# Operators and module from C++; wants GoogleTest, or a network to fetch it from.
cpp() {
  local torch_dir
  torch_dir=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')/Torch &&
    cmake -S . -B build/gpu-tests -DTorch_DIR="$torch_dir" -DIKATTN_BUILD_TESTS=ON &&
    cmake --build build/gpu-tests --parallel --target ikattn_tests &&
    IKATTN_TEST_DEVICE=cuda build/gpu-tests/tests/cpp/ikattn_tests
}
laws() {
  IKATTN_TEST_DEVICE=cuda python_tests tests/python/test_attention_nan.py \
    tests/python/test_attention_laws.py
}
compiled() { python_tests tests/python/test_compilers.py -k replay; }
hopper() {
  IKATTN_WARPGROUPS=1 python_tests tests/python/test_cuda_calls.py tests/python/test_cuda.py \
    -k "float16 or captured or bits or stream"
}
hopper_laws() {
  IKATTN_WARPGROUPS=1 IKATTN_TEST_DEVICE=cuda python_tests tests/python/test_attention_nan.py
}
without_pairs() {
  IKATTN_LINEAR_TIME=always IKATTN_TEST_DEVICE=cuda python_tests tests/python/test_cuda.py \
    tests/python/test_attention_nan.py -k "float16 or attention_nan"
}
memcheck() { sanitized memcheck tests/python/test_cuda_calls.py -k "same_bits or memory"; }
racecheck() { sanitized racecheck tests/python/test_cuda_calls.py -k same_bits; }
# What is not a kind of call there: float32 as TF32.
tf32_memcheck() { sanitized memcheck tests/python/test_cuda.py -k "tf32 and allow"; }
hopper_memcheck() { IKATTN_WARPGROUPS=1 memcheck; }
hopper_racecheck() {
  IKATTN_WARPGROUPS=1 sanitized racecheck tests/python/test_cuda_calls.py \
    -k "same_bits and (folded or causal)"
}
hopper_synccheck() {
  IKATTN_WARPGROUPS=1 sanitized synccheck tests/python/test_cuda_calls.py \
    -k "same_bits and (folded or causal)"
}
benchmark() { python benchmarks/gpu.py --no-flex --lengths 4096 8192 16384 --rounds 5; }
benchmark_by_pairs() { IKATTN_LINEAR_TIME=never benchmark; }
benchmark_without_pairs() { IKATTN_LINEAR_TIME=always benchmark; }
benchmark_hopper() { IKATTN_WARPGROUPS=1 IKATTN_LINEAR_TIME=never benchmark; }
benchmark_maps() { python benchmarks/gpu.py --contributions --rounds 5; }
# FlashAttention's own shapes, masks, few queries, FlexAttention.
benchmark_all() { IKATTN_WARPGROUPS=1 python benchmarks/gpu.py; }

steps=(build programs calls suite laws compiled hopper hopper_laws without_pairs memcheck racecheck
  tf32_memcheck hopper_memcheck hopper_racecheck hopper_synccheck cpp benchmark_by_pairs
  benchmark_without_pairs benchmark_hopper benchmark_maps benchmark_all)
[[ $# -gt 0 ]] || set -- "${steps[@]}"
for step; do
  if [[ " ${steps[*]} " != *" $step "* ]]; then
    echo "tests/gpu.sh: there is no step $step; there are: ${steps[*]}" >&2
    exit 2
  fi
done
summary=()
failed=0
for step; do
  echo "=== $step"
  began=$SECONDS
  "$step" 2>&1 | tee "$logs/$step.log"
  status=${PIPESTATUS[0]}
  [[ $status -eq 0 ]] || failed=1
  summary+=("$(printf '%-24s %s, %d s' "$step" "$([[ $status -eq 0 ]] && echo passed ||
    echo "FAILED with $status")" $((SECONDS - began)))")
done
echo "=== summary, logs in $logs"
printf '%s\n' "${summary[@]}"
exit $failed
