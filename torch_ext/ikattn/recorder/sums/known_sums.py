"""How the sum of a layer was found before: finding it takes time, on a GPU the host must wait.

What is known is used where the same modules run, and held to the numbers when the call has ended.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor, nn


class KnownSum(NamedTuple):
    """Where a sum was formed, and of what."""

    module: weakref.ref[nn.Module]  # whose input it was, or whose output
    is_input: bool
    candidates: int  # residuals that there were to choose from
    candidate: int
    variants: int  # what modules had made of the attention's output
    variant: int
    is_as_it_was: bool  # nothing was written into the residual since it had been seen


_known: weakref.WeakKeyDictionary[nn.Module, KnownSum] = weakref.WeakKeyDictionary()


def takes_waiting(x: Tensor) -> bool:
    """Whether the host must wait for numbers of a tensor."""
    return x.device.type != "cpu"


def known_sum(layer: nn.Module, module: nn.Module, is_input: bool) -> KnownSum | None:
    """How the sum of a layer was found, where it was at this place."""
    known = _known.get(layer)
    if known is None or known.module() is not module or known.is_input != is_input:
        return None
    return known


def remember(layer: nn.Module, known: KnownSum) -> None:
    """Keeps how the sum of a layer was found, as long as the layer lives."""
    _known[layer] = known


def forget(layer: nn.Module) -> None:
    """Has the sum of a layer looked for again."""
    _known.pop(layer, None)
