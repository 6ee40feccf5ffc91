"""Calls of ``F.scaled_dot_product_attention``, by whatever module makes them.

While models are recorded the function is replaced by one that calls it, so that outputs stay what
they are, and then tells the recordings.

Sizes: B batch, H query heads, G key/value heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ikattn._precision import widened
from ikattn.recorder.calls.attention_call import AttentionCall

_NAME = "scaled_dot_product_attention"
_lock = threading.Lock()
_heard: list[Callable[[tuple[Any, ...], dict[str, Any], Tensor], None]] = []
_replaced: list[tuple[dict[str, Any], Any]] = []  # namespaces, and what stood there


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
    kinds = [kind for kind in own.__mro__ if kind not in (nn.Module, object)]
    functions = [
        inspect.unwrap(method)
        for kind in kinds
        for method in vars(kind).values()
        if inspect.isfunction(method)
    ]
    for function in functions:
        names = function.__code__.co_names
        helpers = [function.__globals__.get(name) for name in names]
        if _NAME in names or any(
            inspect.isfunction(helper) and _NAME in helper.__code__.co_names for helper in helpers
        ):
            return True
    return False


@contextlib.contextmanager
def hearing_sdpa(
    model: nn.Module, heard: Callable[[tuple[Any, ...], dict[str, Any], Tensor], None]
) -> Iterator[None]:
    """For the time of the block, tells ``heard`` of each call: arguments and output."""
    namespaces = [vars(F)]
    for kind in {type(module) for module in model.modules()}:
        own = getattr(inspect.unwrap(kind.forward), "__globals__", {})
        if callable(own.get(_NAME)):  # from torch.nn.functional import ...
            namespaces.append(own)
    with _lock:
        _heard.append(heard)
        known = [id(names) for names, _ in _replaced]
        for names in namespaces:
            if id(names) not in known:
                known.append(id(names))
                _replaced.append((names, names[_NAME]))
                names[_NAME] = _telling(names[_NAME])
    try:
        yield
    finally:
        with _lock:
            _heard.remove(heard)
            if not _heard:
                for names, before in _replaced:
                    if getattr(names.get(_NAME), "ikattn_tells", False):
                        names[_NAME] = before
                _replaced.clear()


def _telling(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def tell(*args: Any, **kwargs: Any) -> Tensor:
        output = attend(*args, **kwargs)
        for heard in tuple(_heard):
            heard(args, kwargs, output)
        return output

    tell.ikattn_tells = True  # type: ignore[attr-defined]
    return tell


def _bound(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, float | None]:
    return query, key, value, attn_mask, dropout_p, is_causal, scale


def sdpa_call(
    layer: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[AttentionCall, float]:
    """Returns the inputs of a call, taken for self-attention, and its dropout.

    Raises:
        NotImplementedError: Tensors that are not ``[B, H, L, d]``.
    """
    query, key, value, mask, dropout_p, is_causal, scale = _bound(*args, **kwargs)
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
        scaling=scale,
        attn_mask=mask,
        causal=0 if is_causal else None,
        given_dtype=query.dtype if key.dtype == query.dtype else None,
    )
    return call, dropout_p
