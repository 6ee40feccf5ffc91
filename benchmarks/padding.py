"""What keys cost that padding hides: beside all keys visible, and beside the visible ones alone.

export OMP_WAIT_POLICY=passive
python benchmarks/padding.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import interleaved, processor
from torch import Tensor

import ikattn

HEADS, LENGTH, VISIBLE = 2, 2048, 512


def forward(*given: Tensor, **options: Tensor) -> Tensor:
    with torch.no_grad():
        return ikattn.implicit_kernel_attention(*given, **options)


def both(*given: Tensor, **options: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in given]
    output = ikattn.implicit_kernel_attention(*leaves, **options)
    return torch.autograd.grad(output, leaves, torch.ones_like(output))


def compare(name: str, run: Callable[..., object], seconds: float) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, LENGTH, 64)
    frequencies = 0.02 * torch.randn(2, HEADS, 64, 64)
    bias = torch.zeros(1, 1, LENGTH).index_fill(2, torch.arange(VISIBLE, LENGTH), -torch.inf)
    few = (query, key[:, :, :VISIBLE], value[:, :, :VISIBLE])
    calls = {
        "all visible": lambda: run(query, key, value, *frequencies),
        "hidden": lambda: run(query, key, value, *frequencies, key_bias=bias),
        "left out": lambda: run(*few, *frequencies),
    }
    best = {way: min(times) for way, times in interleaved(calls, seconds).items()}
    cells = " | ".join(f"{1e3 * best[way]:.1f}" for way in calls)
    print(f"| {name} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="per row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor()}, one thread, H = {HEADS}, M = d = 64, N = {LENGTH}; best, ms")
    print(f"| {LENGTH - VISIBLE} keys | all visible | hidden | left out |")
    print("|" + "---|" * 4)
    compare("forward", forward, options.seconds)
    compare("forward + backward", both, options.seconds)


if __name__ == "__main__":
    main()
