"""What attention in linear time errs in 16 bits, beside pairs: the arithmetic of the CUDA kernels.

    python benchmarks/half_moments.py

Imitates, in float64 with the roundings that are made, the kernels of ``csrc/attention/cuda``: pairs
with features in Half and weights in the input's type; moments of products of features, both in
Half (its room ``linear``). Keys lie around a point, the closer the smaller their ``spread``, and
queries up to some distance from it, so that sums of weights are of any size against their mean over
directions taken at random. Errors are those of the output before it is rounded, root mean square
and largest, and of gradients, relative to the gradient's norm.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

BINS = (0, 0.01, 0.03, 0.0625, 0.125, 0.25, 0.5, 1, 4, float("inf"))


def fit(x: Tensor, dim: tuple[int, ...] = ()) -> Tensor:
    """A power of two that brings the largest number to 2^14, as the kernels scale Half."""
    largest = x.abs().amax(dim, keepdim=True) if dim else x.abs().max()
    return torch.exp2(14 - torch.log2(largest.clamp_min(1e-300)).floor())


def half(x: Tensor, dim: tuple[int, ...] = ()) -> Tensor:
    scale = fit(x, dim)
    return (x * scale).half().double() / scale


def two_numbers(x: Tensor) -> Tensor:
    return half(x) + half(x - half(x))


class Case:
    """One head, N = 768, d = M = 64."""

    def __init__(self, dtype: torch.dtype, spread: float, distance: float, mean: float) -> None:
        torch.manual_seed(0)
        n, d, frequencies, self.dtype = 768, 64, 64, dtype
        w = 0.3 * torch.randn(d, frequencies, dtype=torch.float64)
        center = torch.randn(1, d, dtype=torch.float64)
        far = torch.logspace(-1, distance, n, dtype=torch.float64)[:, None]
        q, k, v, grad = (torch.randn(n, d, dtype=torch.float64) for _ in range(4))
        q, k = center + far * q, center + spread * k
        self.v, self.grad = (x.to(dtype).double() for x in (v + mean, grad))
        self.eps = 1e-5 * (4 * frequencies) ** 2
        angles = [x.to(dtype).double() @ w for x in (q, k)]
        self.phi_q, self.phi_k = (2 * torch.cat([x.cos(), x.sin()], 1) for x in angles)

    def typed(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()

    def exact(self) -> dict[str, Tensor]:
        scores = self.phi_q @ self.phi_k.T
        weights = scores**2 + self.eps
        self.sums = weights.sum(1, keepdim=True)
        output = weights @ self.v / self.sums
        self.attended = self.typed(output)  # what the backward reads
        delta = (self.grad * output).sum(1, keepdim=True)
        x = (self.grad @ self.v.T - delta) / self.sums
        squares = self.phi_k.square().sum(1)
        few = 1 + 32 * squares.square().sum() / squares.sum() ** 2
        mean = self.phi_q.square().sum(1) * squares.sum() * few / self.phi_q.shape[1]
        self.share = (self.sums[:, 0] - self.eps * len(weights)) / mean
        return {
            "output": output,
            "phi_q": 2 * (scores * x) @ self.phi_k,
            "phi_k": 2 * (scores * x).T @ self.phi_q,
            "value": (weights / self.sums).T @ self.grad,
        }

    def by_pairs(self) -> dict[str, Tensor]:
        phi_q, phi_k = self.phi_q.half().double(), half(self.phi_k)
        scores = phi_q @ phi_k.T
        weights = scores**2 + self.eps
        scale = 1 if self.dtype == torch.bfloat16 else fit(weights)
        delta = (self.grad * self.attended).sum(1, keepdim=True)
        products = scores * (self.grad @ self.v.T - delta) / self.sums
        normal = weights / self.sums
        unit = 1 if self.dtype == torch.bfloat16 else 2.0**15
        return {
            "output": self.typed(weights * scale) / scale @ self.v / weights.sum(1, keepdim=True),
            "phi_q": 2 * half(products, (1,)) @ phi_k,
            "phi_k": 2 * half(products, (0,)).T @ phi_q,
            "value": self.typed(normal * unit).T @ self.grad / unit,
        }

    def without_pairs(self) -> dict[str, Tensor]:
        phi_q, phi_k = self.phi_q.half().double(), half(self.phi_k)
        n, features = phi_q.shape
        psi_q, psi_k = (half(x[:, :, None] * x[:, None, :]).flatten(1) for x in (phi_q, phi_k))
        center, gram = self.v.mean(0), phi_k.T @ phi_k
        moments = half(psi_k.T @ self.v - gram.reshape(-1, 1) * center)
        gram = two_numbers(gram)
        sums = ((phi_q @ gram) * phi_q).sum(1, keepdim=True) + self.eps * n
        delta = (self.grad * (self.attended - center)).sum(1, keepdim=True)
        of_queries = torch.einsum(
            "ib,bac,ic->ia", phi_q, moments.reshape(features, features, -1), self.grad
        )
        gradients, deltas = half(self.grad / self.sums), half(delta / self.sums)
        turned = half(psi_q.T @ gradients)
        turned_gram = half(phi_q * deltas).T @ phi_q
        turned = turned.reshape(features, features, -1)
        turned_gram = two_numbers(turned_gram + turned @ center)
        of_keys = torch.einsum("jb,bac,jc->ja", phi_k, turned, self.v)
        return {
            "output": center + psi_q @ moments / sums,
            "phi_q": 2 * (of_queries - delta * (phi_q @ gram)) / self.sums,
            "phi_k": 2 * (of_keys - phi_k @ turned_gram),
            "value": psi_k @ turned.flatten(0, 1) + self.eps * (self.grad / self.sums).sum(0),
        }


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for dtype in (torch.bfloat16, torch.float16):
        found: dict[int, list[Tensor]] = {}
        print(f"{dtype}: gradients, in quadratic and in linear time")
        for spread, distance, mean in (
            (1, 0, 0),
            (1, 0, 3),
            (0.3, 0.3, 0),
            (0.1, 0.3, 0),
            (0.03, 0, 0),
            (0.03, 0.3, 0),
        ):
            case = Case(dtype, spread, distance, mean)
            exact, pairs, without = case.exact(), case.by_pairs(), case.without_pairs()
            line = f"  spread {spread:4}, mean {mean}: smallest sum {case.share.min():6.3f}"
            for name in ("phi_q", "phi_k", "value"):
                errors = [
                    (x[name] - exact[name]).norm() / exact[name].norm() for x in (pairs, without)
                ]
                line += f"   {name} {errors[0]:.1e} {errors[1]:.1e}"
            print(line)
            both = [(x["output"] - exact["output"]).abs() for x in (pairs, without)]
            bins = torch.bucketize(case.share, torch.tensor(BINS, dtype=torch.float64)) - 1
            for index in bins.unique().tolist():
                if mean == 0:
                    rows = torch.stack([x[bins == index] for x in both])
                    found.setdefault(index, []).append(rows.flatten(1))
        print(f"{dtype}: output, by sum of weights over its mean\n{'':22}quadratic{'':13}linear")
        for index in sorted(found):
            pairs_, without_ = torch.cat(found[index], 1)
            cells = [f"{x.square().mean().sqrt():.1e} {x.max():.1e}" for x in (pairs_, without_)]
            print(f"  {BINS[index]:6} to {BINS[index + 1]:6}   {cells[0]}     {cells[1]}")


if __name__ == "__main__":
    main()
