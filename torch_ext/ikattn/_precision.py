"""The types that analysis computes in, whatever the types of a model are."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["widened", "without_autocast"]


def widened(x: Tensor) -> Tensor:
    """``x`` in the type that maps are computed in: float64 stays, all else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(device: torch.device) -> torch.autocast:
    """A context in which sums are formed in the types that their terms have."""
    return torch.autocast(device.type, enabled=False)
