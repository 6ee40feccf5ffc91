"""Sums of rows are told number by number: one that is large does not hide the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ikattn.recorder.sums.distances import Distance, NearestRows, SumOfRows, sum_tolerance
from ikattn.recorder.sums.tensors import find_sum, see

DTYPES = [torch.float32, torch.bfloat16]


def rows(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A sum in a type, the residual, and what is added; a number of the residual is large."""
    torch.manual_seed(0)
    before, added = torch.randn(2, 2, 32).to(dtype)
    before[:, 3] = 300
    return (before + added).float(), before.float(), added.float()


def sum_of_rows(dtype: torch.dtype, total: Tensor, before: Tensor, added: Tensor) -> Distance:
    return SumOfRows(sum_tolerance(dtype), True, total, before, added)


def nearest_rows(dtype: torch.dtype, total: Tensor, before: Tensor, added: Tensor) -> Distance:
    others = torch.randn(2, 32), torch.full((2, 32), torch.nan), torch.full((2, 32), torch.inf)
    return NearestRows(sum_tolerance(dtype), True, total, before, (*others, added))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [sum_of_rows, nearest_rows])
def test_a_large_number_does_not_hide_a_scale(
    of: Callable[..., Distance], dtype: torch.dtype
) -> None:
    total, before, added = rows(dtype)
    assert not of(dtype, total, before, added).is_too_far
    assert of(dtype, total, before, 0.5 * added).is_too_far


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_found_by_the_same_rule(dtype: torch.dtype) -> None:
    total, before, added = (each.to(dtype) for each in rows(dtype))
    assert find_sum(total, added, [added.float()], [see(before)]) is not None
    halves = 0.5 * added
    found = find_sum(total, halves, [halves.float()], [see(before)])
    assert found is None or found.scale is not None


@pytest.mark.parametrize("of", [sum_of_rows, nearest_rows])
def test_rows_of_nan_are_compared_with_nothing(of: Callable[..., Distance]) -> None:
    total, before, added = rows(torch.float32)
    total[1], before[1] = torch.nan, torch.nan
    assert not of(torch.float32, total, before, added).is_too_far
    assert of(torch.float32, total, before, 0.5 * added).is_too_far


def test_modules_that_made_nan_or_inf_are_not_what_was_added() -> None:
    total, before, added = rows(torch.float32)
    tolerance = sum_tolerance(torch.float32)
    for wrong in ((), *((torch.full_like(added, x),) for x in (torch.nan, torch.inf))):
        assert NearestRows(tolerance, True, total, before, wrong).is_too_far
