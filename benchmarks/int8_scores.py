"""How far outputs err whose scores are products of int8, as on Hopper: imitated on the CPU.

    python benchmarks/int8_scores.py [--tokens 64] [--causal]

The error of the output, root mean square over that of the output, against float64, by the standard
deviation of frequencies: of rounded features alone, of what the kernel makes of them (weights in
bfloat16, rounded at every step), and of compositions that store every step in bfloat16, with angles
in that type or in float32.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

import ikattn

HEADS, SIZE, FREQUENCIES, EPS = 4, 64, 64, 1e-5
DEVIATIONS = (0.3 / 32, 0.3 / 8, 0.1, 0.3)
SCORE = (2 / 127) ** 2 / (4 * FREQUENCIES)  # of a product of integers


def stored(x: Tensor) -> Tensor:
    """In float64, rounded to bfloat16."""
    return x.float().bfloat16().double()


def features(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return ikattn.reference.spectral_features(x.unsqueeze(0), w1, w2).squeeze(0)


def angles_in_bfloat16(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Features by torch's operators in bfloat16: the reference widens angles to float32."""
    angles = [2 * math.pi * (x.bfloat16() @ w.bfloat16()) for w in (w1, w2)]
    cosines, sines = ([f(angle) for angle in angles] for f in (torch.cos, torch.sin))
    return torch.cat([cosines[0] + cosines[1], sines[0] + sines[1]], -1)


def errors(deviation: float, tokens: int, causal: bool) -> tuple[float, ...]:
    normal = torch.randn(3, HEADS, tokens, SIZE).bfloat16().double()
    query, key, value = normal.unbind()
    w1, w2 = (deviation * torch.randn(HEADS, SIZE, FREQUENCIES).double() for _ in range(2))
    seen = torch.ones(tokens, tokens, dtype=torch.float64)
    seen = seen.tril() if causal else seen
    logits = key.square().sum(-1) / (2 * math.sqrt(SIZE))
    magnitudes = (logits - logits.amax(-1, keepdim=True)).exp().unsqueeze(-2)

    def output(weights: Tensor, of: Tensor = value) -> Tensor:
        weights = weights * seen.to(weights.dtype)
        return weights / weights.sum(-1, keepdim=True) @ of

    phi_q, phi_k = (features(x, w1, w2) for x in (query, key))
    score = phi_q @ phi_k.mT / (4 * FREQUENCIES)
    truth = output((score.square() + EPS) * magnitudes)

    products = (phi_q * 63.5).round() @ (phi_k * 63.5).round().mT
    eps = EPS / SCORE**2
    rounded = output((products.square() + eps) * magnitudes)
    weights = stored(stored(products).square() + stored(torch.tensor(eps)))
    as_the_kernel = output(stored(weights * stored(magnitudes)))

    def composed(of_query: Tensor, of_key: Tensor) -> Tensor:
        score = of_query @ of_key.mT / (4 * FREQUENCIES)
        return output((score * score + EPS) * magnitudes.bfloat16(), value.bfloat16())

    in_bfloat16 = composed(*(angles_in_bfloat16(x, w1, w2) for x in (query, key)))
    in_float32 = composed(phi_q.bfloat16(), phi_k.bfloat16())
    found = (rounded, as_the_kernel, in_bfloat16, in_float32)
    size = score.square().mean().sqrt().item()
    return size, *(float((x.double() - truth).norm() / truth.norm()) for x in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    print("deviation, scores; errors: int8 alone, kernel, composition, with float32 angles")
    for deviation in DEVIATIONS:
        size, *found = errors(deviation, options.tokens, options.causal)
        print(f"{deviation:.4f}  {size:.3f} ", *(f" {error:.1e}" for error in found))


if __name__ == "__main__":
    main()
