"""Choices and numbers that follow from a seed, the same on every machine.

Choices come from SplitMix64, tensors from Philox4x64, both as whole numbers; no function of a
library of mathematics is asked, whose last bits could differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
_64_BITS = (1 << 64) - 1
# Sizes about the tiles of the kernels, the panels and the chunks of linear time.
EDGES = (
    *(1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65),
    *(127, 128, 129, 255, 256, 257, 1023, 1024, 1025),
)
VALUES = ("exact", "normal", "wide", "denormal", "special", "adversarial")


class Draws:
    """A stream of choices."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _64_BITS

    def bits(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _64_BITS
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64_BITS
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        return self.bits() % n

    def chance(self, one_in: float) -> bool:
        return self.bits() < 2.0**64 / one_in

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def weighted(self, weights: dict[T, int]) -> T:
        """Draws one of the keys, each as often as its number says."""
        at = self.below(sum(weights.values()))
        for option, weight in weights.items():
            at -= weight
            if at < 0:
                return option
        raise ValueError("no weights")

    def size(self, low: int, high: int) -> int:
        """Draws from low to high: half of the time an edge, else about log-uniform."""
        edges = [x for x in EDGES if low <= x <= high]
        if edges and self.chance(2):
            return self.choice(edges)
        octaves = max(1, (high // max(1, low)).bit_length())
        top = min(high, max(1, low) << self.below(octaves + 1))
        return low + self.below(top - low + 1)


# One generator whose key is set is made once: making one takes longer than a small tensor.
_PHILOX = np.random.Philox(key=0)
_STATE: Any = _PHILOX.state


def _whole_numbers(seed: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    _STATE["state"]["key"][0] = seed & _64_BITS
    _PHILOX.state = _STATE
    return _PHILOX.random_raw(count)


def uniform(seed: int, *shape: int) -> Tensor:
    """Draws from [0, 1) in float64, multiples of 2^-53."""
    raw = _whole_numbers(seed, math.prod(shape)) >> np.uint64(11)
    return torch.from_numpy(raw.astype(np.float64)).reshape(shape) * 2.0**-53


def integers(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """Draws from low to high, in float64."""
    return (uniform(seed, *shape) * (high - low + 1)).floor() + low


def normal(seed: int, *shape: int) -> Tensor:
    """Draws sums of four uniform numbers, of mean 0 and variance 1: nearly normal, below 3.5."""
    quarters = _whole_numbers(seed, math.prod(shape)).view(np.uint16).reshape(-1, 4)
    sums = torch.from_numpy(quarters.astype(np.float64).sum(-1))
    return ((sums - 131070.0) * (3.0**0.5 / 65536)).reshape(shape)


def _powers_of_two(exponents: Tensor) -> Tensor:
    return torch.from_numpy(np.ldexp(1.0, exponents.to(torch.int32).numpy()))


def numbers(kind: str, role: str, seed: int, *shape: int) -> Tensor:
    """Draws a tensor of a class of values, float64.

    Exact ones are small integers with many zeros, and frequencies quarters and eighths, so that
    features are zeros, ones and twos: nothing is rounded, and a wrong tile is wrong by much.

    Args:
        kind: One of VALUES.
        role: "token", "frequency" (the axis before the last is the head size), "value" or "bias".
        seed: Of the numbers.
        shape: Of the tensor.
    """
    if kind == "exact":
        kept = (uniform(seed + 1, *shape) < 0.5).double()
        if role == "frequency":
            return integers(seed, -3, 3, *shape) * kept / 8
        return integers(seed, *((-8, 8) if role == "value" else (-2, 2)), *shape) * kept
    x = normal(seed, *shape)
    if role == "frequency":
        return x * (0.3 / max(1, shape[-2]) ** 0.5)
    if role == "value" and kind in ("wide", "denormal"):
        least, most = (-30, 30) if kind == "wide" else (-45, -38)
        return x * _powers_of_two(
            integers(seed + 1, 10 * least // 3, 10 * most // 3, *shape[:-1], 1)
        )
    if kind == "wide":
        return x * _powers_of_two(integers(seed + 1, -12, 2, *shape))
    if kind == "denormal" and role == "token":
        return x * (uniform(seed + 1, *shape) < 0.5) * 1e-39
    if kind == "adversarial" and role == "token" and x.numel():
        x = x[..., :1, :].expand(shape).clone() if seed % 3 == 0 else x  # equal
        if seed % 3 == 1:
            x[..., shape[-2] // 2, :] *= 6.0  # one huge
    if kind == "adversarial" and role == "value":
        return x + 1000.0 * (1 - 2 * (torch.arange(shape[-2]) % 2).double()).unsqueeze(-1)
    if kind == "adversarial" and role == "bias":
        return x * 20
    return x
