"""What long sums err: ikattn's error over that of the plain composition, both against float64.

    python benchmarks/long_sums.py [--seeds 3] [--pairs]

One head of size 64, M = 64, float32; values normal, then normal + 1, which do not cancel. Columns
are the output and the gradients of query, key, value, w1 and w2. The tests allow 2 for outputs and
5 for gradients. --pairs keeps linear time out of it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from torch import Tensor

SHAPES = ((48, 1024), (48, 4096), (48, 16384), (48, 65536), (4096, 48), (16384, 48), (2048, 2048))


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output, then the gradients of its product with the same random numbers."""
    call = [x.clone().requires_grad_() for x in inputs]
    output = function(*call)
    generator = torch.Generator().manual_seed(0)
    incoming = torch.randn(output.shape, generator=generator).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, call, incoming)]


def ratios(queries: int, keys: int, mean: float, seed: int) -> Tensor:
    import ikattn  # after the environment is set

    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, 1, length, 64, generator=generator) for length in (queries, keys, keys)
    )
    w1, w2 = (0.02 * torch.randn(1, 64, 64, generator=generator) for _ in range(2))
    inputs = [query, key, value + mean, w1, w2]
    reference = ikattn.reference.implicit_kernel_attention
    truth = results(reference, [x.double() for x in inputs])
    found, composed = (
        torch.tensor([float((x - y).abs().max()) for x, y in zip(of, truth, strict=True)])
        for of in (results(ikattn.implicit_kernel_attention, inputs), results(reference, inputs))
    )
    return found / composed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", action="store_true", help="IKATTN_LINEAR_TIME=never")
    options = parser.parse_args()
    if options.pairs:
        os.environ["IKATTN_LINEAR_TIME"] = "never"
    print("largest of", options.seeds, "seeds: output, then gradients of query, key, value, w1, w2")
    for queries, keys in SHAPES:
        for mean in (0.0, 1.0):
            found = [ratios(queries, keys, mean, seed) for seed in range(options.seeds)]
            row = " ".join(f"{x:6.2f}" for x in torch.stack(found).amax(0).tolist())
            print(f"L = {queries:5d}, S = {keys:5d}, values + {mean:.0f}: {row}", flush=True)


if __name__ == "__main__":
    main()
