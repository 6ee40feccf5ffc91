"""Claims that rows are the same, and how far they are apart.

Nothing is computed before somebody asks, and then of many at once: a layer takes a dozen small
comparisons, which cost more by their number than by what they add up. On a GPU the host would wait
for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


def tolerance_of(dtype: torch.dtype) -> float:
    """How far off a row of a type may be, over the largest number."""
    return TOLERANCES.get(dtype, 1e-1)


@dataclass(eq=False, slots=True)
class Distance:
    """How far rows are apart.

    Attributes:
        tolerance: The part of the largest number that they may be off.
        compare: Of tensors ``[n, ..]`` of n distances: a row's largest difference, number found,
            and expected, ``[n, 3, rows]``.
        tensors: What it compares, of this distance alone; nobody writes into them.
        zeros_count: Whether rows count of which only zeros are expected.
    """

    tolerance: float
    compare: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    zeros_count: bool = True

    @property
    def is_too_far(self) -> bool:
        """Whether they are farther apart than rounding allows; not where numbers are NaN."""
        return float(_off([self])) > self.tolerance


def distance(
    found: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    *,
    zeros_count: bool = True,
    at_once: bool = False,
) -> Distance:
    """How far rows ``[.., D]`` are apart that were computed in a type.

    ``at_once``: they are many, or the model's own, and are compared now.
    """
    found, expected = found.flatten(0, -2), expected.flatten(0, -2)
    if not at_once:
        return Distance(tolerance_of(dtype), rows_apart, (found, expected), zeros_count)
    apart = rows_apart(found.unsqueeze(0), expected.unsqueeze(0))[0]
    return Distance(tolerance_of(dtype), as_compared, (apart,), zeros_count)


def rows_apart(found: Tensor, expected: Tensor) -> Tensor:
    """Compares rows ``[n, rows, D]`` as they were found, and as they are expected."""
    return torch.stack([found - expected, found, expected], 1).abs().amax(-1)


def as_compared(apart: Tensor) -> Tensor:
    """Takes rows that have been compared, ``[n, 3, rows]``."""
    return apart


def normed_rows(
    given: Tensor, made: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compares what a norm has made of rows with the linear map that it is taken for.

    ``given`` and ``made`` are ``[n, rows, D]``, ``scale``, by which each row was divided,
    ``[n, rows, 1]``, weight and bias ``[n, D]``.
    """
    expected = given * weight.unsqueeze(1) / scale
    if bias is not None:
        expected = expected + bias.unsqueeze(1)
    return rows_apart(made, expected.to(made.dtype))


def centered_rows(given: Tensor, *others: Tensor) -> Tensor:
    """Compares as ``normed_rows``, of a norm that takes the mean off."""
    return normed_rows(given - given.mean(-1, keepdim=True), *others)


def sum_of_rows(total: Tensor, before: Tensor, added: Tensor) -> Tensor:
    """Compares rows ``[n, rows, D]`` with the sum of two others."""
    size = before.abs() + added.abs() + total.abs()
    return _shares(share_of_sum(total - before - added, size).amax(-1))


def nearest_rows(total: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
    """Compares rows with the sum of others and of the nearest of ``candidates [n, k, rows, D]``."""
    if not candidates.size(1):
        return _shares(before.new_ones(before.size(0), 1))
    before, total = before.unsqueeze(1), total.unsqueeze(1)
    rest = (total - before - candidates).nan_to_num(torch.inf)  # such candidates are far
    share = share_of_sum(rest, before.abs() + total.abs())
    return _shares(share.amax((2, 3)).amin(1, True))


def _shares(off: Tensor) -> Tensor:
    """Returns differences ``[n, rows]`` that are shares of the numbers already."""
    one = torch.ones_like(off)
    return torch.stack([off, one, one], 1)


def sum_tolerance(dtype: torch.dtype) -> float:
    """The largest ``share_of_sum`` that rounding leaves of a sum in a type."""
    return 2 * torch.finfo(dtype).eps


def share_of_sum(rest: Tensor, size: Tensor) -> Tensor:
    """How much of what was added is left over, number by number.

    ``rest`` is a sum less all that should be in it, ``size`` all their magnitudes. A large number
    beside others does not hide what these are. NaN is compared with nothing.
    """
    share = rest.abs() / size.clamp_min(torch.finfo(size.dtype).tiny)
    return share.nan_to_num(0.0, posinf=torch.inf)


@torch.no_grad()
def offs_of(distances: Iterable[Distance]) -> list[tuple[list[int], Tensor]]:
    """How far off all distances are, those that compare alike together: which, and ``[n]``.

    That is the largest difference over the largest number, of rows that are expected finite.
    """
    alike: dict[Hashable, tuple[list[int], list[Distance]]] = {}
    for number, each in enumerate(distances):
        tensors = ((x.device, x.dtype, x.shape) for x in each.tensors)
        own, kind = alike.setdefault((each.compare, each.zeros_count, *tensors), ([], []))
        own.append(number)
        kind.append(each)
    return [(own, _off(kind)) for own, kind in alike.values()]


def _off(alike: Sequence[Distance]) -> Tensor:
    """Returns how far off distances are, ``[n]``; NaN where a row that counts has NaN."""
    stacked = map(torch.stack, zip(*(each.tensors for each in alike), strict=True))
    apart, found, expected = alike[0].compare(*stacked).unbind(1)
    if apart.size(-1) == 0:  # no rows
        return apart.new_zeros(apart.size(0))
    counts = expected.isfinite()
    if not alike[0].zeros_count:
        counts = counts & (expected > 0)
    size = torch.maximum(found, expected).where(counts, 0.0).amax(-1)
    return apart.where(counts, 0.0).amax(-1) / size.clamp_min(1e-30)


class Claim(NamedTuple):
    """That rows are the same.

    It outlives its run, and so holds nothing of it but a few rows and names.
    """

    layer: str
    step: str  # what the rows would say if they differed
    distance: Distance
    hint: str = ""
    at_fault: Callable[[], None] | None = None  # called where it does not hold


class Settlement:
    """Claims, taken from a list, whose numbers are on their way to the host.

    ``to_cpu`` copies a tensor to the CPU; the copy may be filled later.
    """

    def __init__(self, claims: list[Claim], to_cpu: Callable[[Tensor], Tensor]) -> None:
        self._claims, claims[:] = list(claims), []
        alike = offs_of(claim.distance for claim in self._claims)
        self._copies = [(own, to_cpu(offs)) for own, offs in alike]

    def check(self) -> None:
        """Looks at the numbers, which must have arrived.

        Raises:
            RuntimeError: That of the first claim which does not hold.
        """
        wrong = {
            number: off
            for own, copy in self._copies
            for number, off in zip(own, copy.tolist(), strict=True)
            if off > self._claims[number].distance.tolerance
        }
        for number in wrong:
            at_fault = self._claims[number].at_fault
            if at_fault is not None:
                at_fault()
        if wrong:
            first = min(wrong)
            claim = self._claims[first]
            raise RuntimeError(
                f"record: {claim.layer} does not add up: {claim.step}, which is off by "
                f"{100 * wrong[first]:.3g} % of the largest number{claim.hint}"
            )
