"""Masks of transformers that say padding, with or without causality, or packed sequences.

Sizes: B batch, H heads, L queries, S keys, the last L of which are the queries' own tokens, and N
sequences that are packed in rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn.integrations.transformers.interface import import_transformers

# Keys [B, S] that a mask shows besides causality, and its place and version, by which it is known
# again: by the tensor that holds a mask's elements.
_OF_CAUSAL = WeakTensorKeyDictionary()


def one_row_for_all(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function whose masks of padding alone have one row, which strides repeat.

    The operator takes such a mask for a bias of the keys, and kernels that take no mask of pairs.
    Of masks of causality and padding it is remembered what ``padding_of_causal`` tells. Masks are
    as ``transformers.AttentionMaskInterface`` has them: bool [B, 1, L, S], or None.
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
    by its elements, so that nothing waits for the device. None: the mask says more, or nobody knows
    what: it was changed, or made otherwise.
    """
    if torch.compiler.is_compiling() or mask.is_inference():
        return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a graph that is replayed may find other elements in it
    whole = mask if mask._base is None else mask._base
    shown, *marks = _OF_CAUSAL.get(whole, (None,))
    if shown is None or marks != [_place_of(mask), whole._version]:
        return None
    row: Tensor = shown[:, None, None, :keys]
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
    _OF_CAUSAL[whole] = (row, _place_of(made), whole._version)


def _place_of(mask: Tensor) -> tuple[Any, ...]:
    """Returns where a mask lies; the same for the view of its first keys."""
    return mask.shape[:3], mask.stride(), mask.storage_offset()


def shown_keys(mask: Tensor, *, is_causal: bool) -> Tensor | None:
    """Returns the keys, bool [B or 1, S], that a mask shows; None: it says more than that.

    The mask is bool [B or 1, H or 1, L, S], True = may attend; with ``is_causal`` a query sees keys
    up to its own token alone.

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


# --- Packed batches: several sequences in one row. Positions that restart make a mask whose blocks
# on the diagonal are the sequences; FlashAttentionKwargs are where they begin.

# Sequences found in masks, which the layers of a model share.
_FOUND = WeakTensorKeyDictionary()


class Sequences(NamedTuple):
    """Where the sequences of a packed batch begin, and whether attention in them is causal."""

    queries: Tensor  # [N + 1]
    keys: Tensor  # [N + 1]
    is_causal: bool


def given_sequences(
    module: nn.Module, query: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Reads ``FlashAttentionKwargs``: (cu_seq_lens_q, cu_seq_lens_k); None: nothing."""
    of_queries, of_keys = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if of_queries is None and of_keys is None:
        return None
    if of_queries is None or of_keys is None:
        name = "cu_seq_lens_q" if of_queries is None else "cu_seq_lens_k"
        raise ValueError(f"{type(module).__name__}: {name} must be given with the other one")
    if query.size(0) != 1:
        raise ValueError(
            f"{type(module).__name__}: with cu_seq_lens_q the batch must be one row of packed "
            f"sequences, got {query.size(0)} rows"
        )
    return of_queries, of_keys


def sequences_in(mask: Tensor | None, query: Tensor, key: Tensor) -> Sequences | None:
    """Returns the sequences that a mask keeps apart; None if it is no mask of packed sequences.

    A mask of packed sequences is bool [B, 1, L, L], True = may attend. Sequences begin at places in
    the B * L tokens of the batch, row after row.
    """
    L = query.size(2)
    shape = (query.size(0), 1, L, L)
    if mask is None or mask.dtype != torch.bool or mask.shape != shape or key.size(2) != L:
        return None
    if L < 2 or torch.compiler.is_compiling():
        return None
    # a layer may hand on a view of the model's mask, such as of as many keys as there are
    whole = mask if mask._base is None or mask._base.shape != shape else mask._base
    if whole not in _FOUND:
        _FOUND[whole] = _look_at(whole[:, 0])
    return _FOUND[whole]  # type: ignore[no-any-return]


def _look_at(mask: Tensor) -> Sequences | None:
    """Returns the sequences that a mask [B, L, L] keeps apart, at which nobody has looked."""
    sees_last = mask.diagonal(-1, 1, 2)  # [B, L - 1]: whether token t + 1 sees token t
    if bool(sees_last.all()):
        return None
    begins = torch.nn.functional.pad(~sees_last, (1, 0), value=True)  # [B, L]
    number = begins.cumsum(1)
    together = number[:, :, None] == number[:, None, :]
    is_causal = torch.equal(mask, together.tril())
    if not is_causal and not torch.equal(mask, together):
        return None
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([begins.numel()])]).cpu()
    return Sequences(ends, ends, is_causal)
