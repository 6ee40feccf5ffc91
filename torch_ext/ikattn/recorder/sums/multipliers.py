"""Multipliers that modules apply to an attention's output before the residual sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.recorder.sums.tensors import Seen


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
