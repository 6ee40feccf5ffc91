"""What bounds the CPU kernels on this machine, one thread: multiply-adds, angles, memory.

The loop of multiply-adds is compiled for this processor by the compiler at hand (c++). Angles are
those of spectral_features of tokens of one number, outputs written; memory is a sum over a tensor
that no cache holds.

    export OMP_WAIT_POLICY=passive
    python benchmarks/limits.py
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from timing import interleaved, processor

import ikattn  # noqa: F401 (the operators)

# Twelve accumulators: more than a multiply-add takes clocks, times two of them in a clock.
SOURCE = """
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
typedef float Vec __attribute__((vector_size(kBytes)));

extern "C" double multiply_adds(long rounds, float* sums) {
  Vec sum[12], a, b;
  for (int i = 0; i < kBytes / 4; ++i) a[i] = 0.999f, b[i] = 0.001f;
  for (int i = 0; i < 12; ++i) sum[i] = a * (*sums + float(i));
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sum[i] = sum[i] * a + b;
  }
  for (int i = 0; i < 12; ++i) *sums += sum[i][0];
  return 12.0 * kBytes / 4 * 2 * rounds;
}
"""
ROUNDS = 2_000_000


def compiled(folder: Path) -> ctypes.CDLL:
    library = folder / "limits.so"
    flags = ["-x", "c++", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared"]
    subprocess.run(["c++", *flags, "-o", library, "-"], input=SOURCE, text=True, check=True)
    loop = ctypes.CDLL(str(library))
    loop.multiply_adds.argtypes = [ctypes.c_long, ctypes.POINTER(ctypes.c_float)]
    loop.multiply_adds.restype = ctypes.c_double
    return loop


def main() -> None:
    torch.set_num_threads(1)
    print(f"{processor()}, one thread, best of samples")
    tokens, frequencies = torch.randn(1, 1, 512, 1), torch.randn(2, 1, 1, 64)
    large = torch.ones(1 << 28)
    total = ctypes.c_float()
    with tempfile.TemporaryDirectory() as folder:
        loop = compiled(Path(folder))
        calls: dict[str, Callable[[], object]] = {
            "multiply-adds": lambda: loop.multiply_adds(ROUNDS, ctypes.byref(total)),
            "angles": lambda: torch.ops.ikattn.spectral_features(tokens, *frequencies),
            "memory": lambda: large.sum(),
        }
        # each by itself: memory would take the caches from the others
        best = {name: min(interleaved({name: call}, 3.0)[name]) for name, call in calls.items()}
        flops = loop.multiply_adds(ROUNDS, ctypes.byref(total))
    angles = 2 * frequencies[0].size(-1) * tokens.numel()  # u and v of each frequency
    print(f"multiply-adds  {flops / best['multiply-adds'] / 1e9:7.1f} GFLOP/s of float32")
    print(f"angles         {angles / best['angles'] / 1e9:7.2f} 10^9/s")
    print(f"reading        {4 * large.numel() / best['memory'] / 1e9:7.1f} GB/s")


if __name__ == "__main__":
    main()
