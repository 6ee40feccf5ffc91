"""Attention implementations that record.

While a model is recorded, its config names a function of this module which calls the one named
before, so that outputs stay what they are, and then tells those who listen what the attention was
given.

Sizes: B batch, H query heads, G key/value heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.integrations.transformers.attention import scaled_query
from ikattn.integrations.transformers.interface import (
    Given,
    attention_function,
    configs_of,
    is_causal,
    mask_of,
    register_attention,
)
from ikattn.integrations.transformers.kernels import IMPLICIT, kernel_of
from ikattn.recorder.calls.attention_call import AttentionCall

NORMS = "ikattn_norms"
_RECORDING = "ikattn_record_"  # and the name of the implementation that computes the output
_RECORDABLE = ("eager", "sdpa", NORMS, IMPLICIT)

Listener: TypeAlias = Callable[[nn.Module, Given, Any], None]


class _Switched:
    """A config that names a recording implementation, and by how many recordings."""

    def __init__(self, config: Any, before: str | None) -> None:
        self.config, self.before, self.users = config, before, 0


_lock = threading.Lock()
_listeners: WeakKeyDictionary[nn.Module, tuple[Listener, ...]] = WeakKeyDictionary()
_switched: dict[int, _Switched] = {}  # by id of the config


@contextlib.contextmanager
def listening(model: nn.Module, modules: Iterable[nn.Module], listener: Listener) -> Iterator[None]:
    """For the time of the block, tells ``listener`` of each call of an attention function.

    The listener is called when the output has been computed, in the thread that computed it.

    Args:
        model: The model; every config in it is switched.
        modules: The attention modules to listen to.
        listener: Called with the module, what it passed, and what it got.

    Raises:
        ValueError: The model's attention implementation is one whose masks or weights this package
            does not know.
    """
    modules = list(modules)
    configs = configs_of(model)
    with _lock:
        for config in configs:
            _check_implementation(config)
        for config in configs:
            _switch(config)
        for module in modules:
            _listeners[module] = (*_listeners.get(module, ()), listener)
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                others = tuple(one for one in _listeners[module] if one is not listener)
                if others:
                    _listeners[module] = others
                else:
                    del _listeners[module]
            for config in configs:
                _switch_back(config)


def interface_call(module: nn.Module, given: Given, kind: str | None) -> AttentionCall:
    """Returns the inputs of attention in a call of an attention function.

    Raises:
        NotImplementedError: The call asks for something that this package cannot compute.
    """
    scaling, softcap = given.options.get("scaling"), given.options.get("softcap")
    sinks = given.options.get("s_aux")
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
        _use_kernel(call, kernel_of(module))
    return call


# --- Implementations and configs


class _TellingAttention:
    """An attention function that computes as another one does and then tells the listeners."""

    def __init__(self, implementation: str) -> None:
        self._implementation = implementation

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        attend = attention_function(module, self._implementation)
        output = attend(module, query, key, value, attention_mask, **options)
        for listener in _listeners.get(module, ()):
            given = Given(query, key, value, attention_mask, self._implementation, options)
            listener(module, given, output)
        return output


def _check_implementation(config: Any) -> None:
    name = config._attn_implementation_internal
    if name in (None, *_RECORDABLE) or name.startswith(_RECORDING):
        return
    raise ValueError(
        f"record: the model's attention implementation must be one of {', '.join(_RECORDABLE)}, "
        f'got {name!r}; call model.set_attn_implementation("sdpa") before'
    )


def _switch(config: Any) -> None:
    entry = _switched.get(id(config))
    if entry is None:
        before = config._attn_implementation_internal
        entry = _switched[id(config)] = _Switched(config, before)
        implementation = before or "eager"
        name = _RECORDING + implementation
        register_attention(name, _TellingAttention(implementation), masks_of=implementation)
        config._attn_implementation_internal = name
    entry.users += 1


def _switch_back(config: Any) -> None:
    entry = _switched[id(config)]
    entry.users -= 1
    if entry.users:
        return
    del _switched[id(config)]
    # unless the user set another one meanwhile
    if (config._attn_implementation_internal or "").startswith(_RECORDING):
        config._attn_implementation_internal = entry.before


def _use_kernel(call: AttentionCall, kernel: Any) -> None:
    """Turns a call into one of the implicit kernel, as "ikattn_implicit" computes it."""
    call.query, call.scaling = scaled_query(call.query, call.scaling), None
    call.given_dtype = None
    w1, w2 = getattr(kernel, "drawn", None) or kernel(call.query, call.key, None)
    call.frequencies = (widened(w1), None if w2 is None else widened(w2))
    call.kernel, call.p = "implicit", kernel.p
    call.softmax_heads = getattr(kernel, "softmax_heads", None)
