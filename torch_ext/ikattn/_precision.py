"""The types that analysis computes in, whatever the types of a model are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Returns ``x`` in the type that maps are computed in: float64 stays, all else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def lowered(*tokens: Tensor) -> list[Tensor]:
    """Returns the tokens in autocast's type where it is on, as the operator takes them then."""
    kind = tokens[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return list(tokens)
    dtype = torch.get_autocast_dtype(kind)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tokens]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Opens a context in which sums are formed in the types that their terms have."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()  # a recording enters some ten a layer
