"""Forget gates of attention in transformers, with any cache: values make them, which caches keep.

Only differences of their summed logarithms count, of keys that a query sees. Sizes: B batch, H
query heads, L queries, S keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ikattn.integrations.transformers.interface import Given, causal_mask
from ikattn.integrations.transformers.kernels import IMPLICIT
from ikattn.ops.forgetting import decay_of_pairs


def log_decay_of(gates: Any, given: Given, mask: Tensor | None) -> Tensor:
    """Returns logarithms of gates ``[B, H, S]``, 0 where no query of the call sees a key.

    The mask is bool, True = may attend, or floating point, ``[B or 1, H or 1, L or 1, S]``.
    """
    value, size = given.value, gates.weight.size(-1)
    if value.size(-1) != size:
        raise NotImplementedError(
            f"{IMPLICIT}: forget=True wants values of {size} numbers, got {value.size(-1)}"
        )
    hidden = None
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        shown = mask if is_bool else mask > torch.finfo(mask.dtype).min / 2
        # rows of hidden queries may be full
        seen = (shown & ~shown.all(-1, True)).any(-2) | shown[..., -1, :]
        hidden = ~seen.any(1)[:, -value.size(2) :].expand(value.size(0), -1)
    log_decay: Tensor = gates(
        value.repeat_interleave(given.query.size(1) // value.size(1), 1), hidden
    )
    return log_decay


def gated(gates: Any, given: Given, visibility: dict[str, Any]) -> dict[str, Any]:
    """Returns what a query sees, and how far, as arguments of the operators."""
    mask, length = visibility.get("attn_mask"), given.query.size(2)
    if visibility.get("is_causal"):
        if length == given.key.size(2):
            log_decay = log_decay_of(gates, given, mask)
            if mask is None:
                return {"is_causal": True, "log_decay": log_decay}
            hidden = ~mask[:, 0, :1]  # padding, in one row for all
            bias = torch.zeros(hidden.shape, device=mask.device).masked_fill(hidden, -math.inf)
            return {"is_causal": True, "log_decay": log_decay, "key_bias": bias}
        causal = causal_mask(given.query, given.key)
        mask = causal if mask is None else mask & causal
    log_decay = log_decay_of(gates, given, mask)
    if mask is None and length == 1:
        return {**visibility, "key_bias": decay_of_pairs(log_decay, 1).squeeze(2)}
    if mask is None:
        raise NotImplementedError(
            f"{IMPLICIT}: forget=True wants causal attention, got {length} queries of "
            f"{log_decay.size(2)} keys without a mask"
        )
    return {"attn_mask": decay_of_pairs(log_decay, length, mask)}
