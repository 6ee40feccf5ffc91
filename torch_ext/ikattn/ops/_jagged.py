"""Nested tensors of the jagged layout as what they hold: packed tokens, and where they begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["have_same_lengths", "nested_of", "tokens_of"]


def tokens_of(nested: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [T, ...] of a nested tensor [B, j, ...], and its offsets int64 [B + 1].

    Raises:
        ValueError: The axis of tokens is not the second.
    """
    whole: Any = nested  # torch's type stubs do not know its methods
    if whole._ragged_idx != 1:
        raise ValueError(f"tokens must be on axis 1, got shape {tuple(nested.shape)}")
    if whole.lengths() is not None:  # holes, as narrow leaves them
        whole = whole.contiguous()
    return whole.values(), whole.offsets()


def nested_of(tokens: Tensor, offsets: Tensor) -> Tensor:
    """The nested tensor [B, j, ...] of tokens [T, ...]."""
    return torch.nested.nested_tensor_from_jagged(tokens, offsets=offsets)


def have_same_lengths(one: Tensor, other: Tensor) -> bool:
    """Whether two lists of offsets are equal; where they are one, without a look at numbers."""
    return one is other or torch.equal(one, other)
