"""Where the output of an attention goes: to its out-projection, into a sum, into a norm.

Nothing is taken from names. Two rows of each tensor are kept as they were when it was seen, the
first and the last, and a sum has been found when these rows add up.

Sizes: B batch, L queries, H heads, d_v head size of value, D model size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.recorder.sums.distances import share_of_sum, sum_tolerance

_WIDE = (torch.float32, torch.float64)


class Seen(NamedTuple):
    """A tensor ``[.., D]`` that flowed somewhere, and two of its rows as they were then."""

    tensor: Tensor
    rows: Tensor  # [2, D]
    version: int

    @property
    def is_as_it_was(self) -> bool:
        """Whether nothing has been written into the tensor since."""
        if self.version < 0:  # an inference tensor counts no versions
            return torch.equal(rows_of(self.tensor).nan_to_num(0.0), self.rows.nan_to_num(0.0))
        return self.tensor._version == self.version


class Sum(NamedTuple):
    """That a tensor is a residual plus a variant of y, or plus a multiple of y."""

    residual: Seen
    variant: int  # which of the variants
    scale: float | Tensor | None = None  # of y: a number, [D], or None for 1
    is_alone: bool = True  # no other residual fits
    has_other: bool = False  # another branch's output is in the sum, too


def first_tensor(args: Iterable[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The first floating-point tensor with rows that a module was called with, or has returned."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() >= 2 and value.is_floating_point():
            return value
    return None


def rows_of(x: Tensor) -> Tensor:
    """The first and the last row of ``[.., D]``, ``[2, D]``, in float32 at least: a copy.

    Zeros where there are no rows.
    """
    if x.is_nested:
        x = x.unbind()[0]
    if x.requires_grad:
        x = x.detach()
    if type(x) is Tensor and x.layout == torch.strided and x.numel():
        D = x.size(-1)
        if x.is_contiguous():
            ends = x.as_strided((2, D), (x.numel() - D, 1))
        else:
            *outer, last = zip(x.shape, x.stride(), strict=True)
            step = sum((size - 1) * stride for size, stride in outer)  # from the first to the last
            ends = x.as_strided((2, D), (step, last[1]))
        return ends.clone() if x.dtype in _WIDE else ends.float()
    if not x.numel():
        return widened(x.new_zeros(2, x.size(-1)))
    rows = [x[(x.dim() - 1) * (end,)] for end in (0, -1)]
    if hasattr(x, "full_tensor"):  # a DTensor
        rows = [row.full_tensor() for row in rows]  # type: ignore[attr-defined]
    return torch.stack([widened(row) for row in rows])


def see(x: Tensor) -> Seen:
    """Notes a tensor as it is."""
    return Seen(x, rows_of(x), -1 if x.is_inference() else x._version)


@torch.no_grad()
def same_rows(x: Tensor, rows: Tensor) -> bool:
    """Whether the first and last row of ``x`` are these, bit for bit or rounded to its type."""
    if x.size(-1) != rows.size(-1) or x.numel() == 0:
        return False
    own = rows_of(x)
    rounded = widened(rows.to(x.dtype)).to(own.dtype)
    return torch.equal(own.nan_to_num(0.0), rounded.nan_to_num(0.0))


def may_be_sum(x: Tensor, y: Tensor) -> bool:
    """Whether ``x`` is another tensor than ``y``, with as many rows of the same size."""
    if not has_rows_like(x, y) or x.device != y.device or (not x.numel() and x.shape != y.shape):
        return False
    here = address_of(x)
    return here is not None and here != address_of(y)


def has_rows_like(x: Tensor, y: Tensor) -> bool:
    """Whether ``x`` has as many rows of the same size, where numbers can be looked at."""
    is_alike = x.size(-1) == y.size(-1) and x.numel() == y.numel()
    return is_alike and x.layout == torch.strided


def address_of(x: Tensor) -> int | None:
    """Where the numbers of a tensor are; None where that is not known, as in torch.func.grad.

    A tensor without numbers is told from others by the object that it is.
    """
    try:
        return x.data_ptr() or id(x)
    except RuntimeError:
        return None


@torch.no_grad()
def find_sum(
    x: Tensor,
    y: Tensor,
    variants: Sequence[Tensor],
    residuals: Sequence[Seen],
    others: Any = (),
) -> Sum | None:
    """Whether ``x`` is a residual plus the attention's output, and which.

    Args:
        x: A tensor that may be the sum (``may_be_sum``).
        y: The output of the attention, ``[.., D]``.
        variants: The two rows of ``y``, and of what modules have made of it since.
        residuals: What may have been added, the most likely first.
        others: Rows of other branches, one of which may be in the sum, too.

    Returns:
        None where nothing adds up, on both rows as far as they are finite.
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
        own = before[found[0]].nan_to_num(0.0)
        is_alone = all(torch.equal(before[other].nan_to_num(0.0), own) for other in found[1:])
        return Sum(residuals[found[0]], variant, is_alone=is_alone)
    if others:
        branches = torch.stack([rows.to(total.dtype) for rows in others])  # [K, 2, D]
        fits = _fits(rest[:, :, None] - branches, size[:, :, None] + branches.abs(), y.dtype)
        fits = fits.any(2)  # [C, V]
        for candidate, row in enumerate(fits.tolist()):
            if any(row):
                return Sum(residuals[candidate], row.index(True), has_other=True)
    return _find_scaled(x, y, total, before, variants[0].to(total.dtype), residuals)


@torch.no_grad()
def order_of_rows(
    x: Tensor, y: Tensor, found: Sum, *, in_every_row: bool
) -> Literal["same", "turned"] | None:
    """In which order a sum that was found has the rows of the attention's output.

    Windows of an image, for example, may share their first and last row with it, and no other.

    Args:
        x: The sum.
        y: The attention's output, or the variant of it that was added.
        found: The sum as two rows tell it.
        in_every_row: Whether all of it can be compared. Else the sizes must be the same, or those
            of rows below each other.

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


def _find_scaled(
    x: Tensor,
    y: Tensor,
    total: Tensor,
    before: Tensor,
    rows: Tensor,
    residuals: Sequence[Seen],
) -> Sum | None:
    """Finds a sum of the residual and a multiple of ``y``, by a number or one a channel."""
    if y.dtype not in (torch.float64, torch.float32):
        return None  # whose rounding would hide what is added
    for index, seen in enumerate(residuals):
        rest = total - before[index]
        if not bool(rest.isfinite().all()) or not bool(rows.isfinite().all()):
            continue
        scale = _multiple_of(rest, rows, y.dtype, float(before[index].abs().max()))
        if scale is not None:
            return Sum(seen, 0, scale)
    return None


@torch.no_grad()
def _multiple_of(
    rest: Tensor, rows: Tensor, dtype: torch.dtype, size: float
) -> float | Tensor | None:
    """Returns the multiplier of two rows [2, D]: a number, [D], or None where it is neither.

    Args:
        rest: The products.
        rows: The rows.
        dtype: In which they were computed.
        size: Of the numbers in whose rounding ``rest`` was formed.
    """
    largest = float(rest.abs().max())
    allowed = 16 * torch.finfo(dtype).eps * (size + largest)
    square = float(rows.square().sum())
    if square == 0 or largest <= 8 * allowed:
        return None
    number = float((rest * rows).sum()) / square
    if float((rest - number * rows).abs().max()) <= allowed:
        return number
    cross = rest[0] * rows[1] - rest[1] * rows[0]
    if torch.equal(rows[0], rows[1]) or bool(
        (cross.abs() > allowed * (rows[0].abs() + rows[1].abs())).any()
    ):
        return None
    scale: Tensor = (rest * rows).sum(0) / rows.square().sum(0).clamp_min(1e-30)
    return scale
