"""Linear time in two steps, moments and what queries read of them, beside the one operator.

export OMP_WAIT_POLICY=passive
python benchmarks/moments.py --length 65536 --frequencies 16
"""

from __future__ import annotations

import argparse
import math

import torch
from timing import interleaved, processor
from torch import Tensor

import ikattn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--frequencies", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    size = 64
    tokens = [torch.randn(1, 8, options.length, size) for _ in range(3)]
    w1, w2 = 0.05 * torch.randn(2, 8, size, options.frequencies)
    logits = tokens[1].double().square().sum(-1) / (2 * math.sqrt(size))
    grad = torch.randn_like(tokens[2])

    def one(query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> Tensor:
        return ikattn.implicit_kernel_attention(query, key, value, w1, w2)

    def two(query: Tensor, key: Tensor, value: Tensor, logits: Tensor) -> Tensor:
        phi_q, phi_k = (ikattn.ops.spectral_features(x, w1, w2) for x in (query, key))
        return ikattn.ops.attention_from_moments(
            phi_q, *ikattn.ops.key_moments(phi_k, logits, value)
        )[0]

    ways = {"one operator": one, "two": two}
    print(f"{processor()}, {options.threads} threads, 8 heads of 64, float32; best, s")
    for name, leaves in (("forward", False), ("with backward", True)):
        inputs = [x.clone().requires_grad_(leaves) for x in (*tokens, logits)]

        def run(way: object, inputs: list[Tensor] = inputs, leaves: bool = leaves) -> None:
            output = way(*inputs)  # type: ignore[operator]
            if leaves:
                output.backward(grad)

        rivals = {key: lambda way=way: run(way) for key, way in ways.items()}  # type: ignore[misc]
        best = {key: min(x) for key, x in interleaved(rivals, options.seconds).items()}
        ratio = best["two"] / best["one operator"]
        print(f"{name}: {best['one operator']:.2f} and {best['two']:.2f}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
