"""Numbers that are the same in every run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def normals(seed: int, dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    """Returns a function that draws tensors of a shape, in float64 whatever their type."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def moved(module: Any, size: float) -> Any:
    """Moves every parameter that is trained, so that none is at a special value."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn_like(parameter))
    return module


def for_moments(case: Any, S: int, seed: int) -> tuple[Tensor, ...]:
    """Features of queries and of S keys, logits, values; sizes are as in ikattn.ops.moments."""
    draw = normals(seed)
    query, key = draw(case.B, case.H, case.L, 2 * case.M), draw(case.B, case.K, S, 2 * case.M)
    logits, value = 3 * draw(case.B, case.K, S), draw(case.B, case.G, S, case.d_v)
    is_hidden = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed))
    return query, key, logits.masked_fill(is_hidden < case.hidden, -math.inf), value
