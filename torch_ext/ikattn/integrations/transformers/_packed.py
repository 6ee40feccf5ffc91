"""Packed batches of transformers: several sequences in one row, told apart by mask or by lengths.

transformers tells an attention function of them in two ways. Positions that restart make a mask,
[B, 1, L, L], whose blocks on the diagonal are the sequences; ``FlashAttentionKwargs`` are where
they begin. Sizes: B batch, H query heads, G key/value heads, L tokens, N sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

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
    """Reads ``FlashAttentionKwargs``: (cu_seq_lens_q, cu_seq_lens_k); None: nothing.

    Raises:
        ValueError: One of the two is missing, or the batch has more than one row.
    """
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

    Args:
        mask: Bool [B, 1, L, L], True = may attend; any other is none of packed sequences.
        query: [B, H, L, d].
        key: [B, G, L, d].

    Returns:
        Where sequences begin in the B * L tokens of the batch, row after row.
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
