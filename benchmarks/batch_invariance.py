"""What deterministic("batch") costs: its time over that without, in turns in one process.

export OMP_WAIT_POLICY=passive
python benchmarks/batch_invariance.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import interleaved, processor

import ikattn

HEADS, SIZE = 8, 64


def call_of(
    frequencies: int, queries: int, length: int, dtype: torch.dtype, is_causal: bool, backward: bool
) -> Callable[[], object]:
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, queries, SIZE).to(dtype)
    key, value = torch.randn(2, 1, HEADS, length, SIZE).to(dtype)
    w1, w2 = (0.02 * torch.randn(2, HEADS, SIZE, frequencies)).to(dtype)
    leaves = [x.requires_grad_(backward) for x in (query, key, value, w1, w2)]

    def call() -> object:
        output = ikattn.implicit_kernel_attention(*leaves, is_causal=is_causal)
        return torch.autograd.grad(output, leaves, torch.ones_like(output)) if backward else output

    return call


def cost(call: Callable[[], object], seconds: float) -> float:
    """The best time of batch-invariant calls over the best of others."""

    def invariant() -> object:
        with ikattn.deterministic("batch"):
            return call()

    samples = interleaved({"run": call, "batch": invariant}, seconds)
    return min(samples["batch"]) / min(samples["run"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="per number")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor()}, one thread, H = {HEADS}, d = {SIZE}; batch over run")
    ways = {
        "forward": (False, False),
        "forward, causal": (True, False),
        "forward + backward": (False, True),
        "forward + backward, causal": (True, True),
    }
    print(f"| type, M, N | {' | '.join(ways)} | one query |")
    print("|" + "---|" * (len(ways) + 2))
    for dtype in (torch.float32, torch.bfloat16):
        for frequencies in (16, 64):
            for length in options.lengths:
                calls = [call_of(frequencies, length, length, dtype, *way) for way in ways.values()]
                calls.append(call_of(frequencies, 1, length, dtype, False, False))
                cells = " | ".join(f"{cost(call, options.seconds):.2f}" for call in calls)
                name = str(dtype).removeprefix("torch.")
                print(f"| {name}, {frequencies}, {length} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
