#!/usr/bin/env bash
# All that wants a GPU, in parts that can be run by name: docs/guide/cuda.md, "With a GPU".
#
#   tests/gpu.sh suite calls table              # some parts
#   tests/gpu.sh --wheel ikattn-*.whl build     # installs a wheel that was built elsewhere
#   tests/gpu.sh                                # all parts, in at most sixteen minutes with a wheel
#   tests/gpu.sh --list                         # the parts, and how many seconds each may take
#
# A part that takes longer than it may is ended and has failed; the others run. What each printed is
# kept in build/gpu/PART.log (GPU_LOGS names another folder); the last lines say how each ended.
# Python, pytest, its xdist and torch are those on PATH. For a wheel for Hopper's GPUs, on any
# machine with nvcc: CUDAARCHS=90-real pip wheel --no-build-isolation --no-deps .
set -uo pipefail
cd "$(dirname "$0")/.."

parts=(build selftest programs suite suite_linear suite_mma float32 calls replay memcheck racecheck initcheck
  synccheck table compare maps)
# Seconds; of `build` with a wheel.
declare -A limits=([build]=25 [selftest]=90 [programs]=25 [suite]=150 [suite_linear]=60 [suite_mma]=60
  [float32]=45 [calls]=60 [replay]=30 [memcheck]=60 [racecheck]=45 [initcheck]=60 [synccheck]=60 [table]=80
  [compare]=50 [maps]=30)
without_wheel=600

wheel=""
inner=""
while [[ ${1:-} == --* ]]; do
  case $1 in
    --wheel)
      wheel=${2:?--wheel needs the path of a wheel}
      [[ -f $wheel ]] || { echo "tests/gpu.sh: there is no wheel $wheel" >&2; exit 2; }
      shift
      ;;
    --list)
      for part in "${parts[@]}"; do echo "$part ${limits[$part]}"; done
      exit 0
      ;;
    --inner) inner=yes ;; # one part, by this script itself
    *)
      echo "tests/gpu.sh: unknown option $1 (--wheel FILE, --list)" >&2
      exit 2
      ;;
  esac
  shift
done
[[ -n $wheel || -n $inner ]] || limits[build]=$without_wheel

logs=${GPU_LOGS:-build/gpu}
mkdir -p "$logs"
workers=$(($(nproc) > 2 ? $(nproc) - 1 : 2))
tests=tests/python

python_tests() { python -m pytest -q -p no:cacheprovider "$@"; }
shared_tests() { python_tests -n "$workers" --dist worksteal "$@"; }
# Tests that every device must pass, and those of a GPU.
of_all_devices=("$tests/operators/test_attention_nan.py" "$tests/operators/test_attention_laws.py")
sm90a() {
  nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Icsrc -Icsrc/include -Itests/cpp \
    "$@" -o "$logs/program" && "$logs/program"
}
sanitized() {
  local tool=$1
  shift
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
    python -m pytest -q -x -p no:cacheprovider "$@"
}

build() {
  if [[ -n $wheel ]]; then
    python -m pip install --no-deps --no-index --force-reinstall "$wheel"
  else
    python -m pip install --no-build-isolation --no-deps .
  fi && python -m ikattn info
}
# Every family of kernels, those that no GPU has proven, too: a hang has a name.
selftest() { python -m ikattn selftest --device cuda --unproven --json "$logs/selftest.json"; }
# Hopper's products, each form alone; copies by TMA and a ring of stages.
programs() {
  sm90a tests/cpp/hardware/wgmma.cu && sm90a tests/cpp/hardware/copies.cu tests/cpp/interpreter/sample_copies.cu
}
# All families; then those that calls take by default.
suite() {
  IKATTN_KERNELS=+unproven IKATTN_TEST_DEVICE=cuda shared_tests "$tests/gpu/test_cuda.py" \
    "$tests/gpu/test_cuda_contributions.py" "$tests/gpu/test_cuda_edges.py" "$tests/gpu/test_cuda_record.py" \
    "$tests/gpu/test_cuda_decoding.py" "$tests/gpu/test_cuda_int8.py" \
    "$tests/operators/test_which_kernels.py" "$tests/operators/test_key_masks.py" "${of_all_devices[@]}" &&
    IKATTN_TEST_DEVICE=cuda shared_tests "$tests/gpu/test_cuda.py" "$tests/gpu/test_cuda_int8.py" \
      "$tests/gpu/test_cuda_contributions.py"
}
suite_linear() {
  IKATTN_KERNELS=+causal_linear IKATTN_LINEAR_TIME=always IKATTN_TEST_DEVICE=cuda shared_tests "$tests/gpu/test_cuda.py" \
    "${of_all_devices[@]}" -k "float16 or attention_nan"
}
# What other GPUs than Hopper's run.
suite_mma() {
  IKATTN_KERNELS=-hopper IKATTN_TEST_DEVICE=cuda shared_tests "$tests/gpu/test_cuda.py" \
    "${of_all_devices[@]}"
}
# Float32 without TF32 on CUDA cores and in split products, timed; the suite has the tests of both.
float32() {
  local failed=0 families
  for families in +split -split; do
    IKATTN_KERNELS=$families python benchmarks/gpu.py --dtype float32 --no-flex --lengths 512 2048 \
      --rounds 3 || failed=1
  done
  return $failed
}
# Streams, graphs, bits, sizes beyond 2^31; and first, in a process of its own, missing memory.
calls() {
  local failed=0
  export IKATTN_KERNELS=+unproven
  python_tests "$tests/gpu/test_cuda_calls.py" -k memory_that_is_not_there || failed=1
  python_tests "$tests/gpu/test_cuda_calls.py" -k "not memory_that_is_not_there" || failed=1
  return $failed
}
replay() { python_tests "$tests/operators/test_compilers.py" -k replay; }
memcheck() { IKATTN_KERNELS=+unproven sanitized memcheck "$tests/gpu/test_cuda_calls.py" -k same_bits; }
# Memory that kernels read before anybody has written it, and barriers that not all threads reach: what
# the interpreter cannot see between blocks, or in a warpgroup.
initcheck() { IKATTN_KERNELS=+unproven sanitized initcheck "$tests/gpu/test_cuda_calls.py" -k same_bits; }
synccheck() { IKATTN_KERNELS=+unproven sanitized synccheck "$tests/gpu/test_cuda_calls.py" -k same_bits; }
# mma.sync's kernels: of Hopper's it reports what the smallest ring of stages shows, too
# (docs/guide/cuda.md, "With a GPU").
racecheck() {
  IKATTN_KERNELS=+unproven,-hopper sanitized racecheck "$tests/gpu/test_cuda_calls.py" \
    -k "same_bits and (folded or causal or float32)"
}
# Attention beside torch's, in quadratic and in linear time.
table() {
  IKATTN_LINEAR_TIME=never python benchmarks/gpu.py --no-flex \
    --lengths 256 512 1024 2048 4096 16384 --rounds 5 &&
    IKATTN_LINEAR_TIME=always python benchmarks/gpu.py --no-flex --lengths 8192 16384 65536 --rounds 5
}
# What is beside the table: mma.sync; steps of decoding by kernels.
compare() {
  IKATTN_KERNELS=-hopper IKATTN_LINEAR_TIME=never python benchmarks/gpu.py --no-flex --lengths 4096 --rounds 3 &&
    IKATTN_KERNELS=+decoding python benchmarks/gpu.py --decoding --rounds 3
}
maps() { IKATTN_KERNELS=+given_maps,+streamed_maps python benchmarks/gpu.py --contributions --rounds 5; }

[[ $# -gt 0 ]] || set -- "${parts[@]}"
for part; do
  if [[ " ${parts[*]} " != *" $part "* ]]; then
    echo "tests/gpu.sh: there is no part $part; there are: ${parts[*]}" >&2
    exit 2
  fi
done
if [[ -n $inner ]]; then
  "$1"
  exit
fi

summary=()
failed=0
for part; do
  echo "=== $part"
  began=$SECONDS
  options=(--inner)
  [[ -z $wheel ]] || options=(--wheel "$wheel" --inner)
  timeout --kill-after=5 "${GPU_LIMIT:-${limits[$part]}}" bash tests/gpu.sh "${options[@]}" "$part" 2>&1 |
    tee "$logs/$part.log"
  status=${PIPESTATUS[0]}
  case $status in
    0) said=passed ;;
    124 | 137) said="ended after its ${GPU_LIMIT:-${limits[$part]}} s" ;;
    *) said="FAILED with $status" ;;
  esac
  [[ $status -eq 0 ]] || failed=1
  summary+=("$(printf '%-14s %s, %d s' "$part" "$said" $((SECONDS - began)))")
done
echo "=== summary, logs in $logs"
printf '%s\n' "${summary[@]}"
exit $failed
