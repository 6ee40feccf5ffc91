"""Finds the sum of a residual and an attention's output among a block's tensors.

Nothing is taken from names: a sum has been found when two rows of it add up.

Sizes: B batch, L queries, D model size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.recorder.sums.claims import share_of_sum, sum_tolerance
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

    def adds_up(y: Tensor) -> bool:  # rows of NaN are compared with nothing
        added = widened(y.reshape(total.shape))
        added = added if found.scale is None else added * found.scale
        size = before.abs().amax(-1) + added.abs().amax(-1) + total.abs().amax(-1)
        if found.scale is not None:  # as accurate as the largest of the rows it was found by
            size = size.nan_to_num(0.0).amax()
        off = (total - before - added).abs().amax(-1)
        return not bool((off > 16 * torch.finfo(y.dtype).eps * size).any())

    if adds_up(y):
        return "same"
    may_be_turned = y.dim() == 3 and y.shape[:2] == x.shape[1::-1]
    return "turned" if may_be_turned and adds_up(y.transpose(0, 1)) else None


def _fits(rest: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Tells which rests [.., 2, D] are the rounding of sums of a size, not all NaN."""
    fits = share_of_sum(rest, size) <= sum_tolerance(dtype)
    return fits.flatten(-2).all(-1) & ~rest.isnan().flatten(-2).all(-1)


# --- Multipliers that modules apply to an attention's output before the sum


@dataclass
class Variant:
    """The attention's output, or what modules have made of it on its way to the sum."""

    seen: Seen
    by: nn.Module | None = None
    of: Tensor | None = None  # what ``by`` was called with: the variant before it

    @property
    def tensor(self) -> Tensor:
        return self.seen.tensor

    @property
    def rows(self) -> Tensor:
        return self.seen.rows


def multiplier_of(chain: Sequence[Variant]) -> float | Tensor | None:
    """Returns the multiplier from the first variant to the last; None where a module does more.

    Every row is looked at, or two where something was written into the last since.
    """
    whole: float | Tensor = 1.0
    for before, after in pairwise(chain):
        if after.of is None or isinstance(after.by, nn.Dropout):
            continue
        dtype = after.tensor.dtype
        if not before.seen.is_as_it_was:
            return None
        if after.seen.is_as_it_was:
            scale = multiplied(after.tensor, after.of, dtype)
        else:
            scale = multiplied(after.rows, before.rows, dtype)
        if scale is None:
            return None
        whole = whole * scale
    return whole


@torch.no_grad()
def multiplied(
    x: Tensor, y: Tensor, dtype: torch.dtype, size: float | None = None
) -> float | Tensor | None:
    """Returns the multiplier of every row from ``y`` to ``x``, both ``[.., D]``, of a type.

    ``size`` is that of numbers in whose rounding the products were formed; None: of their own. A
    number, ``[D]``, or None where it is neither, or rows are too much alike to tell. Rows that are
    not finite do not count, but in products of a size, of which all must be.
    """
    made, rows = (widened(each.detach()).reshape(-1, y.size(-1)) for each in (x, y))
    is_finite = (made.isfinite() & rows.isfinite()).all(-1, keepdim=True)
    if size is not None and not bool(is_finite.all()):
        return None
    made, rows = made.where(is_finite, 0.0), rows.where(is_finite, 0.0)
    limits = torch.finfo(dtype)
    most = float(made.abs().max())
    rounding = None if size is None else 16 * limits.eps * (size + most)
    if not bool(rows.any()) or (rounding is not None and most <= 8 * rounding):
        return None

    def is_made_by(scale: Tensor) -> bool:
        expected = rows * scale
        allowed = 4 * limits.eps * (expected.abs() + limits.tiny) if rounding is None else rounding
        return bool(((made - expected).abs() <= allowed).all())

    # over the largest of each channel, so that no square leaves its range
    largest = rows.abs().amax(0)
    smallest = torch.finfo(rows.dtype).tiny
    unit = torch.where(largest > 0, largest, 1.0)
    products, squares = (made / unit * (rows / unit)).sum(0), (rows / unit).square().sum(0)
    scale = products / squares.clamp_min(smallest)
    share = (unit / largest.amax()).square()  # of a channel in the whole
    number = (products * share).sum() / (squares * share).sum()
    if is_made_by(number):
        return float(number)
    return scale if is_made_by(scale) and not are_alike(rows, dtype) else None


def are_alike(rows: Tensor, dtype: torch.dtype) -> bool:
    """Whether rows ``[N, D]`` are multiples of one; any linear map then multiplies each number.

    Channels count alike, however large they are.
    """
    rows = rows.nan_to_num(0.0)
    rows = rows / rows.abs().amax(0).clamp_min(torch.finfo(rows.dtype).tiny)
    largest = rows[rows.square().sum(-1).argmax()]
    along = largest / largest.norm().clamp_min(torch.finfo(rows.dtype).tiny)
    rest = rows - (rows @ along)[:, None] * along
    rounding = min(1000 * torch.finfo(dtype).eps, 0.05)
    return not bool(rest.abs().amax() > rounding * largest.abs().amax())
