"""Masks that say no more than padding, with or without causality.

Sizes: B batch, H heads, L queries, S keys, the last L of which are the queries' own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["shown_keys"]


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
