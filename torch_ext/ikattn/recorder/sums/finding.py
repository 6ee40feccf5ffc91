"""Finds the sum of a residual and an attention's output among a block's tensors.

Nothing is taken from names: a sum has been found when two rows of it add up.

Sizes: B batch, L queries, D model size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.recorder.sums.distances import share_of_sum, sum_tolerance
from ikattn.recorder.sums.multipliers import multiplied
from ikattn.recorder.sums.tensors import Seen, rows_of, same_numbers


class Sum(NamedTuple):
    """That a tensor is a residual plus a variant of y, or plus a multiple of y."""

    residual: Seen
    variant: int  # which of the variants
    scale: float | Tensor | None = None  # of y: a number, [D], or None for 1
    is_alone: bool = True  # no other residual fits
    has_other: bool = False  # another branch's output is in the sum, too


@torch.no_grad()
def find_sum(
    x: Tensor,
    y: Tensor,
    variants: Sequence[Tensor],
    residuals: Sequence[Seen],
    others: Sequence[Tensor] = (),
) -> Sum | None:
    """Finds which residual and which variant of the attention's output ``y`` add up to ``x``.

    Residuals stand with the most likely first. ``variants`` are the two rows of y and of what
    modules have made of it since, ``others`` those of branches, one of which may be in the sum,
    too. None where nothing adds up, on both rows as far as they are finite.
    """
    residuals = [
        seen
        for seen in residuals
        if seen.rows.size(-1) == y.size(-1) and seen.rows.device == y.device
    ]
    if not residuals:
        return None
    total = rows_of(x)
    others = [rows for rows in others if rows.device == y.device]
    before = torch.stack([seen.rows.to(total.dtype) for seen in residuals])  # [C, 2, D]
    added = torch.stack([rows.to(total.dtype) for rows in variants])  # [V, 2, D]
    rest = total - before[:, None] - added  # [C, V, 2, D]
    size = before.abs()[:, None] + added.abs() + total.abs()
    fitting = _fits(rest, size, y.dtype).tolist()
    found = [candidate for candidate, row in enumerate(fitting) if any(row)]
    if found:
        variant = fitting[found[0]].index(True)
        is_alone = all(same_numbers(before[other], before[found[0]]) for other in found[1:])
        return Sum(residuals[found[0]], variant, is_alone=is_alone)
    if others:
        branches = torch.stack([rows.to(total.dtype) for rows in others])  # [K, 2, D]
        fits = _fits(rest[:, :, None] - branches, size[:, :, None] + branches.abs(), y.dtype)
        fits = fits.any(2)  # [C, V]
        for candidate, row in enumerate(fits.tolist()):
            if any(row):
                return Sum(residuals[candidate], row.index(True), has_other=True)
    if y.dtype not in (torch.float64, torch.float32):
        return None  # whose rounding would hide that it is multiplied
    for index, seen in enumerate(residuals):
        largest = float(before[index].abs().max())
        scale = multiplied(total - before[index], added[0], y.dtype, largest)
        if scale is not None:
            return Sum(seen, 0, scale)
    return None


@torch.no_grad()
def order_of_rows(
    x: Tensor, y: Tensor, found: Sum, *, in_every_row: bool
) -> Literal["same", "turned"] | None:
    """In which order a sum that was found has the rows of the attention's output.

    Windows of an image, for example, may share their first and last row with it, and no other.

    ``y`` is the output, or the variant of it that was added. Where not all of it can be compared,
    ``in_every_row``, the sizes must be the same, or those of rows below each other.

    Returns:
        "turned" where one is ``[L, B, D]`` and the other ``[B, L, D]``; None where nothing adds up.
    """
    residual = found.residual.tensor
    if not (in_every_row and x.numel() == residual.numel()):
        is_plain = x.shape == y.shape or min(x.dim(), y.dim()) == 2 or residual.dim() < x.dim()
        return "same" if is_plain else None
    if any(type(each) not in (Tensor, nn.Parameter) for each in (x, y, residual)):
        return "same"
    total, before = (widened(each.reshape(-1, y.size(-1))) for each in (x, residual))

    def adds_up(y: Tensor) -> bool:
        added = widened(y.reshape(total.shape))
        return _differs_nowhere(total, before, added, found.scale, y.dtype)

    if adds_up(y):
        return "same"
    may_be_turned = y.dim() == 3 and y.shape[:2] == x.shape[1::-1]
    return "turned" if may_be_turned and adds_up(y.transpose(0, 1)) else None


def _differs_nowhere(
    total: Tensor, before: Tensor, added: Tensor, scale: float | Tensor | None, dtype: torch.dtype
) -> bool:
    """Whether rows ``[rows, D]`` are the sum of others; those of NaN are compared with nothing."""
    added = added if scale is None else added * scale
    size = before.abs().amax(-1) + added.abs().amax(-1) + total.abs().amax(-1)
    if scale is not None:  # which is as accurate as the largest of the rows it was found by
        size = size.nan_to_num(0.0).amax()
    off = (total - before - added).abs().amax(-1)
    return not bool((off > 16 * torch.finfo(dtype).eps * size).any())


def _fits(rest: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Tells which rests [.., 2, D] are the rounding of sums of a size, not all NaN."""
    fits = share_of_sum(rest, size) <= sum_tolerance(dtype)
    return fits.flatten(-2).all(-1) & ~rest.isnan().flatten(-2).all(-1)
