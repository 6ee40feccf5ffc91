"""Parameters of which the ranks of a mesh hold parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["local", "whole"]


def local(x: Tensor) -> Tensor:
    """The part of a DTensor that is on this rank; a plain tensor is all of it."""
    sharded: Any = x
    return sharded.to_local() if _is_dtensor(x) else x


@contextmanager
def whole(parameter: Tensor) -> Iterator[Tensor]:
    """A tensor to fill, without grad, with first values of a parameter of which ranks hold parts.

    A plain parameter is filled itself. For a DTensor it is a plain tensor of the whole shape; what
    the first rank writes there is scattered afterwards, so that all ranks must come here.
    """
    with torch.no_grad():
        if not _is_dtensor(parameter):
            yield parameter
            return
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        yield values
        if not values.is_meta:
            from torch.distributed.tensor import distribute_tensor

            sharded: Any = parameter
            sharded.copy_(distribute_tensor(values, sharded.device_mesh, sharded.placements))


def _is_dtensor(x: Tensor) -> bool:
    if type(x) in (Tensor, nn.Parameter):  # without an import of what most programs do not need
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)
