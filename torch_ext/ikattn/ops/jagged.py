"""Nested tensors of the jagged layout as what they hold: packed tokens, and where they begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tokens_of(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens [T, ...] of a nested tensor [B, j, ...], and their offsets, [B + 1]."""
    whole: Any = nested  # torch's type stubs do not know its methods
    if whole._ragged_idx != 1:
        raise ValueError(f"tokens must be on axis 1, got shape {tuple(nested.shape)}")
    if whole.lengths() is None:
        return whole.values(), whole.offsets()
    rows, offsets = _rows_between_holes(whole)
    return whole.values().index_select(0, rows), offsets


def nested_like(nested: Tensor, tokens: Tensor) -> Tensor:
    """Nests tokens [T, ...] as another tensor [B, j, ...] is nested."""
    whole: Any = nested
    if whole.lengths() is None:
        return torch.nested.nested_tensor_from_jagged(tokens, offsets=whole.offsets())
    rows, _ = _rows_between_holes(whole)
    values = tokens.new_zeros((whole.values().size(0), *tokens.shape[1:]))
    return torch.nested.nested_tensor_from_jagged(
        values.index_copy(0, rows, tokens), offsets=whole.offsets(), lengths=whole.lengths()
    )


def have_same_lengths(one: Tensor, other: Tensor) -> bool:
    """Whether two lists of offsets are equal; where they are one, without a look at numbers."""
    return one is other or torch.equal(one, other)


def _rows_between_holes(whole: Any) -> tuple[Tensor, Tensor]:
    """Returns the rows of the values that are tokens, with offsets, for a narrowed tensor."""
    starts, lengths = whole.offsets()[: whole.lengths().size(0)], whole.lengths()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    first = (starts - offsets[:-1]).repeat_interleave(lengths)
    return first + torch.arange(first.size(0), device=first.device), offsets
