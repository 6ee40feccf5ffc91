"""Masks that say no more than padding, with or without causality.

Sizes: B batch, H heads, L queries, S keys, the last L of which are the queries' own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn.integrations.transformers.interface import import_transformers


class _Padding(NamedTuple):
    """The keys that a mask hides besides causality, and marks to know the mask again."""

    row: Tensor  # [B, S], True = may attend
    place: tuple[Any, ...]
    version: int


# Found padding, by the tensor that holds a mask's elements.
_OF_CAUSAL = WeakTensorKeyDictionary()


def one_row_for_all(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function whose masks of padding alone have one row, which strides repeat.

    The operator takes such a mask for a bias of the keys, and kernels that take no mask of pairs.
    Of masks of causality and padding it is remembered what ``padding_of_causal`` tells.

    Args:
        make_mask: As ``transformers.AttentionMaskInterface`` has it: bool [B, 1, L, S], or None.
    """
    masks = import_transformers().masking_utils

    @wraps(make_mask)
    def make(*arguments: Any, **named: Any) -> Any:
        function = named.get("mask_function")
        if function is masks.bidirectional_mask_function and "q_length" in named:
            row = make_mask(*arguments, **named | {"q_length": 1})
            return row if row is None else row.expand(-1, -1, named["q_length"], -1)
        made = make_mask(*arguments, **named)
        # nobody knows what arguments without names are
        if made is not None and not arguments and function is masks.causal_mask_function:
            _remember(made, named)
        return made

    return make


def padding_of_causal(mask: Tensor, keys: int) -> Tensor | None:
    """Returns the padding of a causal mask with padding, bool [B, 1, L, keys], one row for all.

    Query i sees key j where the row shows it and j <= i. It is known by how the mask was made, not
    by its elements, so that nothing waits for the device.

    Args:
        mask: As a module was given it.
        keys: How many of the mask's keys there are.

    Returns:
        None: the mask says more, or nobody knows what: it was changed, or made otherwise.
    """
    if torch.compiler.is_compiling() or mask.is_inference():
        return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a graph that is replayed may find other elements in it
    whole = mask if mask._base is None else mask._base
    known = _OF_CAUSAL.get(whole)
    if known is None or known.place != _place_of(mask) or known.version != whole._version:
        return None
    row: Tensor = known.row[:, None, None, :keys]
    return row.expand(-1, -1, mask.size(2), -1)


def _remember(made: Tensor, named: dict[str, Any]) -> None:
    """Keeps the padding of a mask of causality and padding, if the first query sees the first key.

    Queries that follow keys of a cache see more than the operators' ``is_causal`` says.
    """
    offsets = [named.get(name, 0) for name in ("q_offset", "kv_offset")]
    # a static cache may have tensors, whose values only the device knows
    is_top_left = all(isinstance(x, int) and x == 0 for x in offsets)
    shown = named.get("attention_mask")
    if not is_top_left or shown is None or named.get("use_vmap") or made.size(2) < 2:
        return
    if torch.compiler.is_compiling() or made.is_inference() or made.dtype != torch.bool:
        return
    whole = made if made._base is None else made._base
    # the last query sees all keys that any sees; a view would keep the whole mask alive
    row = made[:, 0, -1].clone()
    _OF_CAUSAL[whole] = _Padding(row, _place_of(made), whole._version)


def _place_of(mask: Tensor) -> tuple[Any, ...]:
    """Returns where a mask lies; the same for the view of its first keys."""
    return mask.shape[:3], mask.stride(), mask.storage_offset()


def shown_keys(mask: Tensor, *, is_causal: bool) -> Tensor | None:
    """Returns the keys, bool [B or 1, S], that a mask shows; None: it says more than that.

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
