"""Tensors that flow through a block: two rows of each are kept as they were when it was seen.

Sizes: D model size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikattn._precision import widened

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
            return same_numbers(rows_of(self.tensor), self.rows)
        return self.tensor._version == self.version


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Goes through the tensors of tuples, lists and dictionaries."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for each in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(each)


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
    return Seen(x, rows_of(x), -1 if x.is_inference() else x._version)


@torch.no_grad()
def same_numbers(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same numbers, of one type and place; NaN is the same as 0."""
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        return False
    is_one = x is y or (x.data_ptr() == y.data_ptr() and x.stride() == y.stride())
    return is_one or torch.equal(x.nan_to_num(0.0), y.nan_to_num(0.0))


@torch.no_grad()
def same_rows(x: Tensor, rows: Tensor) -> bool:
    """Whether the first and last row of ``x`` are these, bit for bit or rounded to its type."""
    if x.size(-1) != rows.size(-1) or x.numel() == 0:
        return False
    own = rows_of(x)
    return same_numbers(own, widened(rows.to(x.dtype)).to(own))


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


def takes_waiting(x: Tensor) -> bool:
    """Whether the host must wait for numbers of a tensor."""
    return x.device.type != "cpu"
