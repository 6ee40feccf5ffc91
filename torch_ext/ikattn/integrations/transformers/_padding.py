"""Masks that say no more than padding, with or without causality.

Sizes: B batch, H heads, L queries, S keys, the last L of which are the queries' own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ikattn.integrations.transformers._interface import import_transformers

__all__ = ["one_row_for_all", "shown_keys"]


def one_row_for_all(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes masks of padding alone as one row, which strides repeat.

    The operator takes such a mask for a bias of the keys, and kernels that take no mask of pairs.

    Args:
        make_mask: As ``transformers.AttentionMaskInterface`` has it: bool [B, 1, L, S], or None.
    """

    of_padding = import_transformers().masking_utils.bidirectional_mask_function

    @wraps(make_mask)
    def make(*arguments: Any, **named: Any) -> Any:
        if named.get("mask_function") is not of_padding or "q_length" not in named:
            return make_mask(*arguments, **named)
        row = make_mask(*arguments, **named | {"q_length": 1})
        return row if row is None else row.expand(-1, -1, named["q_length"], -1)

    return make


def shown_keys(mask: Tensor, *, is_causal: bool) -> Tensor | None:
    """The keys, bool [B or 1, S], that a mask shows to queries; None: it says more than that.

    Args:
        mask: Bool [B or 1, H or 1, L, S], True = may attend.
        is_causal: Whether a query sees keys up to its own token alone.

    Rows of hidden tokens are nobody's: they may be what the mask makes of the others, empty, or
    full, which is how masks are made where an empty row would be NaN.
    """
    length, past = mask.size(2), mask.size(3) - mask.size(2)
    shown = mask[:, 0, -1]
    expected = shown[:, None, None].expand(-1, 1, length, -1)
    if is_causal:
        expected = expected & torch.ones_like(mask[:1, :1]).tril(past)
    if past < 0:
        return None
    own_is_hidden = ~shown[:, None, past:, None]
    is_nobodys = own_is_hidden & (mask.all(-1, True) | ~mask.any(-1, True))
    return shown if bool(((mask == expected) | is_nobodys).all()) else None
