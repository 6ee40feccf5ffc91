"""Calls of ``F.scaled_dot_product_attention``, by whatever module makes them.

Sizes: B batch, H query heads, G key/value heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ikattn._precision import widened
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.hearing import Heard, hearing, methods_of

_NAME = "scaled_dot_product_attention"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


def calls_sdpa(module: nn.Module) -> bool:
    """Whether the module's own code names the function.

    Its own code is its class's methods, the functions that these name, and, of diffusers'
    attention, its processor.
    """
    processor = getattr(module, "processor", None)
    kinds: list[Any] = [type(module)]
    if processor is not None and not isinstance(processor, nn.Module):
        kinds.append(type(processor))
    return any(_names_sdpa(kind) for kind in kinds)


@functools.cache
def _names_sdpa(own: Any) -> bool:
    methods = methods_of(own)
    named = (each.__globals__.get(name) for each in methods for name in each.__code__.co_names)
    functions = [*methods, *filter(inspect.isfunction, named)]
    return any(_NAME in function.__code__.co_names for function in functions)


def hearing_sdpa(model: nn.Module, heard: Heard) -> AbstractContextManager[None]:
    """For the time of the block, tells ``heard`` of each call: arguments and output."""
    namespaces = [vars(F)]
    for kind in {type(module) for module in model.modules()}:
        own = getattr(inspect.unwrap(kind.forward), "__globals__", {})
        if callable(own.get(_NAME)):  # from torch.nn.functional import ...
            namespaces.append(own)
    return hearing("sdpa", [(names, _NAME) for names in namespaces], heard)


def sdpa_call(
    layer: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[AttentionCall, float]:
    """Returns the inputs of a call, taken for self-attention, and its dropout.

    Raises:
        NotImplementedError: Tensors that are not ``[B, H, L, d]``.
    """
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    query, key, value, mask = *(given[name] for name in _ARGUMENTS[:3]), given.get("attn_mask")
    if query.dim() != 4 or query.is_nested:
        raise NotImplementedError(
            f"record: {layer} must call {_NAME} with [B, H, L, d] to be recorded, got "
            f"{list(query.shape) if not query.is_nested else 'nested tensors'}; layers=... leaves "
            "it out"
        )
    if mask is not None:
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
        mask = mask if mask.dtype == torch.bool else widened(mask)
    call = AttentionCall(
        query=widened(query),
        key=widened(key),
        value=widened(value),
        kind="self",
        scaling=given.get("scale"),
        attn_mask=mask,
        causal=0 if given.get("is_causal") else None,
        given_dtype=query.dtype if key.dtype == query.dtype else None,
    )
    return call, given.get("dropout_p") or 0.0
