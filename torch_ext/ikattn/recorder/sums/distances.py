"""How far rows are apart that should be the same.

Nothing is computed before somebody asks, and then of many at once: a layer takes a dozen small
comparisons, which cost more by their number than by what they add up. On a GPU the host would wait
for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# How far off, over the largest number, a row may be that the model and we both compute, where each
# rounds by itself: products of the model's type, sums of scores and values.
TOLERANCES = {
    torch.float64: 1e-5,  # many models form the weights of any type in float32
    torch.float32: 2e-3,  # TF32, where torch allows it, is 1e-3 a product
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
}


@dataclass(eq=False, slots=True)
class Distance(ABC):
    """How far rows are apart.

    Attributes:
        tolerance: The part of the largest number that they may be off.
        zeros_count: Whether rows count of which only zeros are expected.
    """

    tolerance: float
    zeros_count: bool

    @abstractmethod
    def kind(self) -> tuple[Hashable, ...]:
        """Returns a key that is equal for distances that can be computed together."""

    @staticmethod
    @abstractmethod
    def together(alike: Sequence[Any]) -> Tensor:
        """Returns a row's largest difference, number found, and expected: ``[n, 3, rows]``."""

    @property
    def is_too_far(self) -> bool:
        """Whether they are farther apart than rounding allows; not where numbers are NaN."""
        return float(_off([self])) > self.tolerance


@dataclass(eq=False, slots=True)
class Numbers(Distance):
    """A distance that has been computed: ``[3, rows]``."""

    numbers: Tensor

    def kind(self) -> tuple[Hashable, ...]:
        return Numbers, *_like(self.numbers)

    @staticmethod
    def together(alike: Sequence[Numbers]) -> Tensor:
        return torch.stack([each.numbers for each in alike])


@dataclass(eq=False, slots=True)
class Rows(Distance):
    """Rows ``[rows, D]`` as they were found, and as they are expected."""

    found: Tensor
    expected: Tensor

    def kind(self) -> tuple[Hashable, ...]:
        return Rows, *_like(self.found)

    @staticmethod
    def together(alike: Sequence[Rows]) -> Tensor:
        found = torch.stack([each.found for each in alike])
        return _apart(found, torch.stack([each.expected for each in alike]))


@dataclass(eq=False, slots=True)
class NormedRows(Distance):
    """Rows that a norm was given and has made, and the linear map that it is taken for.

    Attributes:
        given: ``[rows, D]``.
        made: Likewise.
        scale: ``[rows, 1]``, what each was divided by.
        weight: ``[D]``.
        bias: ``[D]``, or None.
        centered: Whether the mean is taken off.
    """

    given: Tensor
    made: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor | None
    centered: bool

    def kind(self) -> tuple[Hashable, ...]:
        bias = None if self.bias is None else self.bias.dtype
        types = (self.made.dtype, self.scale.dtype, self.weight.dtype, bias)
        return NormedRows, self.centered, self.made.shape, *types, *_like(self.given)

    @staticmethod
    def together(alike: Sequence[NormedRows]) -> Tensor:
        x, made, scale = (
            torch.stack([getattr(each, name) for each in alike])
            for name in ("given", "made", "scale")
        )
        if alike[0].centered:
            x = x - x.mean(-1, keepdim=True)
        expected = x * torch.stack([each.weight for each in alike]).unsqueeze(1) / scale
        biases = [each.bias for each in alike if each.bias is not None]
        if biases:
            expected = expected + torch.stack(biases).unsqueeze(1)
        return _apart(made, expected.to(made.dtype))


@dataclass(eq=False, slots=True)
class SumOfRows(Distance):
    """Rows ``[rows, D]`` that should be the sum of two others."""

    total: Tensor
    before: Tensor
    added: Tensor

    def kind(self) -> tuple[Hashable, ...]:
        return SumOfRows, *_like(self.total)

    @staticmethod
    def together(alike: Sequence[SumOfRows]) -> Tensor:
        total, before, added = (
            torch.stack([getattr(each, name) for each in alike])
            for name in ("total", "before", "added")
        )
        size = before.abs() + added.abs() + total.abs()
        off = share_of_sum(total - before - added, size).amax(-1)
        one = torch.ones_like(off)
        return torch.stack([off, one, one], 1)


@dataclass(eq=False, slots=True)
class NearestRows(Distance):
    """Rows ``[rows, D]`` that should be the sum of others and of one of k candidates."""

    total: Tensor
    before: Tensor
    candidates: tuple[Tensor, ...]

    def kind(self) -> tuple[Hashable, ...]:
        return NearestRows, len(self.candidates), *_like(self.total)

    @staticmethod
    def together(alike: Sequence[NearestRows]) -> Tensor:
        n, k = len(alike), len(alike[0].candidates)
        before, total = (
            torch.stack([getattr(each, name) for each in alike]).unsqueeze(1)
            for name in ("before", "total")
        )
        one = before.new_ones(n, 1)
        off = one
        if k:
            candidates = torch.stack([row for each in alike for row in each.candidates])
            candidates = candidates.view(n, k, *before.shape[2:])
            rest = (total - before - candidates).nan_to_num(torch.inf)  # such candidates are far
            share = share_of_sum(rest, before.abs() + total.abs())
            off = share.amax((2, 3)).amin(1, True)
        return torch.stack([off, one, one], 1)


def distance(
    found: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    *,
    zeros_count: bool = True,
    at_once: bool = False,
) -> Distance:
    """How far rows ``[.., D]`` are apart that were computed in a type.

    Args:
        found, expected: The rows; nobody writes into them until they are compared.
        dtype: The type.
        zeros_count: Whether rows count of which only zeros are expected.
        at_once: They are many, or the model's own: to be compared now.
    """
    tolerance = TOLERANCES.get(dtype, 1e-1)
    found, expected = found.flatten(0, -2), expected.flatten(0, -2)
    if not at_once:
        return Rows(tolerance, zeros_count, found, expected)
    return Numbers(tolerance, zeros_count, _apart(found.unsqueeze(0), expected.unsqueeze(0))[0])


def sum_tolerance(dtype: torch.dtype) -> float:
    """The largest ``share_of_sum`` that rounding leaves of a sum in a type."""
    return 2 * torch.finfo(dtype).eps


def share_of_sum(rest: Tensor, size: Tensor) -> Tensor:
    """How much of what was added is left over, number by number.

    A large number beside others does not hide what these are. NaN is compared with nothing.

    Args:
        rest: A sum less all that should be in it.
        size: The magnitudes of the sum and of what should be in it, added up.
    """
    share = rest.abs() / size.clamp_min(torch.finfo(size.dtype).tiny)
    return share.nan_to_num(0.0, posinf=torch.inf)


@torch.no_grad()
def offs_of(distances: Iterable[Distance]) -> list[tuple[list[int], Tensor]]:
    """How far off all distances are, those of a kind together: which, and ``[n]``.

    That is the largest difference over the largest number, of rows that are expected finite.
    """
    alike: dict[Hashable, tuple[list[int], list[Distance]]] = {}
    for number, each in enumerate(distances):
        own, kind = alike.setdefault((each.zeros_count, *each.kind()), ([], []))
        own.append(number)
        kind.append(each)
    return [(own, _off(kind)) for own, kind in alike.values()]


def _off(alike: Sequence[Distance]) -> Tensor:
    """Returns how far off distances of a kind are, ``[n]``; NaN where a row that counts has NaN."""
    apart, found, expected = alike[0].together(alike).unbind(1)
    if apart.size(-1) == 0:  # no rows
        return apart.new_zeros(apart.size(0))
    counts = expected.isfinite()
    if not alike[0].zeros_count:
        counts = counts & (expected > 0)
    size = torch.maximum(found, expected).where(counts, 0.0).amax(-1)
    return apart.where(counts, 0.0).amax(-1) / size.clamp_min(1e-30)


def _like(x: Tensor) -> tuple[Hashable, ...]:
    return x.device, x.dtype, x.shape


def _apart(found: Tensor, expected: Tensor) -> Tensor:
    """Returns a row's largest difference, number found, and expected: [n, 3, rows]."""
    return torch.stack([found - expected, found, expected], 1).abs().amax(-1)
