"""Calls of the attention functions that transformers' models look up by name.

Sizes: B batch, H query heads, G key/value heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.integrations.transformers._gates import log_decay_of
from ikattn.integrations.transformers.attention import scaled_query
from ikattn.integrations.transformers.interface import (
    Given,
    configs_of,
    import_transformers,
    is_causal,
    mask_of,
)
from ikattn.integrations.transformers.kernels import IMPLICIT, kernel_of
from ikattn.ops.forgetting import decay_of_pairs
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.hearing import Told, hearing

_EAGER = "eager_attention_forward"  # which each file of transformers has for itself
_RECORDABLE = ("eager", "sdpa", IMPLICIT)

# Told of the module, what it passed, and what it got, in the thread that computed it.
Listener: TypeAlias = Callable[[nn.Module, Given, Any], None]


def listening(model: nn.Module, listener: Listener) -> AbstractContextManager[None]:
    """For the time of the block, tells ``listener`` of each call of an attention function.

    Raises:
        ValueError: The model's attention implementation is one whose masks or weights this package
            does not know.
    """
    for config in configs_of(model):
        name = config._attn_implementation_internal
        if name not in (None, *_RECORDABLE):
            raise ValueError(
                "record: the model's attention implementation must be one of "
                f"{', '.join(_RECORDABLE)}, got {name!r}; call "
                'model.set_attn_implementation("sdpa") before'
            )
    registered = import_transformers().AttentionInterface._global_mapping
    places = [(registered, name) for name in _RECORDABLE if name in registered]
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    for names in (vars(sys.modules[file]) for file in files):
        if callable(names.get(_EAGER)):
            places.append((names, _EAGER))

    def heard(told: Told) -> None:
        implementation = "eager" if told.name == _EAGER else told.name
        listener(*_given(implementation, *told.args, **told.kwargs), told.output)

    return hearing("interface", places, heard)


def _given(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[nn.Module, Given]:
    return module, Given(query, key, value, attention_mask, implementation, options)


def interface_call(module: nn.Module, given: Given, kind: str | None) -> AttentionCall:
    """Returns the inputs of attention in a call of an attention function.

    Raises:
        NotImplementedError: The call asks for something that this package cannot compute.
    """
    scaling, softcap = given.options.get("scaling"), given.options.get("softcap")
    sinks = given.options.get("s_aux", given.options.get("sinks"))
    told = given.attention_mask is not None or given.options.get("position_bias") is not None
    causal = 0 if not told and is_causal(module, given) else None  # without a mask of all pairs
    call = AttentionCall(
        query=widened(given.query),
        key=widened(given.key),
        value=widened(given.value),
        kind="cross" if kind == "cross" else "self",
        scaling=None if scaling is None else float(scaling),
        attn_mask=mask_of(module, given) if causal is None else None,
        causal=causal,
        softcap=None if softcap is None else float(softcap),
        sinks=None if sinks is None else widened(sinks),
        given_dtype=given.query.dtype if given.key.dtype == given.query.dtype else None,
    )
    if given.implementation == IMPLICIT:
        _use_kernel(call, kernel_of(module), given)
    return call


def _use_kernel(call: AttentionCall, kernel: Any, given: Given) -> None:
    """Turns a call into one of the implicit kernel, as "ikattn_implicit" computes it."""
    call.query, call.scaling = scaled_query(call.query, call.scaling), None
    call.given_dtype = None
    w1, w2 = getattr(kernel, "drawn", None) or kernel(call.query, call.key, None)
    call.frequencies = (widened(w1), None if w2 is None else widened(w2))
    call.kernel, call.p = "implicit", kernel.p
    call.softmax_heads = getattr(kernel, "softmax_heads", None)
    gates = getattr(kernel, "forget", None)
    if gates is not None:
        mask = call.mask()
        log_decay = log_decay_of(gates, given, mask)
        call.attn_mask = decay_of_pairs(log_decay, given.query.size(2), mask)
        call.causal = None
