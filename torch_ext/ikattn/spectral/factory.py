"""The spectral source of a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from ikattn.spectral.direct import Direct, Stationary, checked_seed
from ikattn.spectral.ikan import Ikan
from ikattn.spectral.mikan import Mikan

# A name, a source, or what makes one of these for an attention module
Spectral: TypeAlias = "str | nn.Module | Callable[[nn.MultiheadAttention], str | nn.Module]"

_KINDS = {"direct": Direct, "stationary": Stationary, "ikan": Ikan, "mikan": Mikan}
SOURCES = tuple(_KINDS)
_NAMES = ", ".join(map(repr, SOURCES))


def make_spectral(
    spectral: str | nn.Module, *, stationary: bool, seed: int | None, **options: Any
) -> nn.Module:
    """Returns the spectral source of that name, or the module that was given in place of a name.

    Options are those that all sources take: sizes, device and dtype.
    """
    check_spectral(spectral, seed)
    if not isinstance(spectral, str | nn.Module):
        raise ValueError(
            f"a function given as spectral must return one of {_NAMES} or a torch.nn.Module, got "
            f"{spectral!r}"
        )
    if isinstance(spectral, nn.Module):
        if stationary:
            raise ValueError(
                f"stationary=True is for {_NAMES}, got it with a {type(spectral).__name__}, which "
                "says itself whether it returns w2"
            )
        return spectral
    if spectral != "stationary":
        options["stationary"] = stationary
    kind: Callable[..., nn.Module] = _KINDS[spectral]
    return kind(seed=seed, **options)


def check_spectral(spectral: Spectral, seed: int | None) -> None:
    """Raises ValueError for what is no source of frequencies, or no seed."""
    if not callable(spectral) and spectral not in SOURCES:
        raise ValueError(
            f"spectral must be one of {_NAMES}, a torch.nn.Module, or a function that makes one, "
            f"got {spectral!r}"
        )
    checked_seed(seed)
