"""The spectral source of a name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ikattn.spectral.direct import Direct, Stationary
from ikattn.spectral.ikan import Ikan
from ikattn.spectral.mikan import Mikan

SOURCES = ("direct", "stationary", "ikan", "mikan")


def make_spectral(
    spectral: str | nn.Module,
    *,
    num_heads: int,
    head_dim: int,
    num_frequencies: int,
    stationary: bool,
    seed: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """Returns the spectral source of that name, or the module that was given in place of a name.

    Raises:
        ValueError: The name is unknown, or an option is out of range.
    """
    if isinstance(spectral, nn.Module):
        return spectral
    sizes = (num_heads, head_dim, num_frequencies)
    options: dict[str, Any] = {"seed": seed, "device": device, "dtype": dtype}
    if spectral == "stationary":
        return Stationary(*sizes, **options)
    options["stationary"] = stationary
    if spectral == "direct":
        return Direct(*sizes, **options)
    if spectral == "ikan":
        return Ikan(*sizes, **options)
    if spectral == "mikan":
        return Mikan(*sizes, **options)
    names = ", ".join(map(repr, SOURCES))
    raise ValueError(f"spectral must be one of {names} or a torch.nn.Module, got {spectral!r}")
