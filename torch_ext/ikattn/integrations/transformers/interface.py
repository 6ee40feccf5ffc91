"""Where transformers and attention functions meet: registration, configs, and what a call is given.

transformers 5 looks its attention functions up by the name in a model's config, and the functions
that make its masks by the same name.

Sizes: B batch, H query heads, G key/value heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ikattn._optional import optional
from ikattn._precision import widened
from ikattn.nn.parameter_groups import having

# The lowest float16: what masks of any type mean by "never" is at most that.
_LOWEST = -65504.0
_logger = logging.getLogger("ikattn")
_on_purpose: set[int] = set()  # ids of configs that softmax_in_place has changed
# Modules whose frames hand a setting on, and did not decide on it.
_HANDS_ON = (
    "huggingface_hub.dataclasses",
    "transformers.configuration_utils",
    "transformers.modeling_utils",
    __name__,
)
_lines = WeakIdKeyDictionary()  # file and line, by config
_told = WeakIdKeyDictionary()  # attention implementations, by config


class Given(NamedTuple):
    """The arguments that an attention module passed to its attention function."""

    query: Tensor  # [B, H, L, d]
    key: Tensor  # [B, G, S, d]
    value: Tensor  # [B, G, S, d_v]
    attention_mask: Tensor | None  # broadcastable to [B, H, L, S]; bool: True = may attend
    implementation: str  # that computed the output
    options: dict[str, Any]  # the other arguments


def calls_interface(module: nn.Module) -> bool:
    """Whether the module's forward calls transformers' AttentionInterface."""
    if not type(module).__module__.startswith("transformers") and not hasattr(module, "config"):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def configs_of(model: nn.Module) -> list[Any]:
    """Returns every config in the model that names an attention implementation, once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = {id(x): x for x in configs if hasattr(x, "_attn_implementation_internal")}
    return list(found.values())


@contextmanager
def softmax_in_place(model: nn.Module) -> Iterator[None]:
    """Opens a context in which every config of the model names softmax attention."""
    configs = configs_of(model)
    _on_purpose.update(map(id, configs))
    try:
        with having(configs, "_attn_implementation_internal", "eager"):
            yield
    finally:
        _on_purpose.difference_update(map(id, configs))


def import_transformers() -> Any:
    install = "'ikattn[transformers]'"
    return optional("transformers", "ikattn.integrations.transformers", install)


def mask_of(module: nn.Module, given: Given) -> Tensor | None:
    """Returns the mask of a call with its position bias, as ``AttentionCall.attn_mask``."""
    mask, bias = given.attention_mask, given.options.get("position_bias")
    if mask is not None and mask.dim() != 4:
        raise NotImplementedError(
            f"{type(module).__name__} got an attention mask of shape {list(mask.shape)}; "
            "masks must have shape [B, H or 1, L, S]"
        )
    if mask is None and is_causal(module, given):
        mask = causal_mask(given.query, given.key)
    if mask is None:
        return None if bias is None else widened(bias)
    mask = mask[..., : given.key.size(2)]
    if mask.dtype == torch.bool:
        return mask if bias is None else widened(bias).masked_fill(~mask, -math.inf)
    mask = widened(mask).masked_fill(mask <= _LOWEST, -math.inf)
    return mask if bias is None else mask + bias


def is_causal(module: nn.Module, given: Given) -> bool:
    """Whether the attention function hides later keys although it was given no mask."""
    if given.implementation == "eager" or given.query.size(2) == 1:
        return False
    return says_causal(module, given.options)


def says_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether a module, or the call in its place, says that attention is causal."""
    passed = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if passed is None else passed)


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Returns a mask that hides later keys, bool [1, 1, L, S]."""
    sizes = query.size(2), key.size(2)
    return torch.ones(1, 1, *sizes, dtype=torch.bool, device=query.device).tril()


# --- Code of a library may set another attention in a model's config, as Whisper's ``generate``
# does for timestamps; the model then computes softmax without a word.


def watch_configs(kernel: str) -> None:
    """Notes from now on which line sets another attention where a config names ``kernel``."""
    config_class = import_transformers().PreTrainedConfig
    watched = config_class._attn_implementation
    if getattr(watched.fset, "is_watched", False):
        return

    def set_implementation(config: Any, value: Any) -> None:
        before = getattr(config, "_attn_implementation_internal", None)
        watched.fset(config, value)
        if before == kernel and config._attn_implementation_internal != kernel:
            _lines[config] = _line()
        elif config._attn_implementation_internal == kernel:
            _lines.pop(config, None)
            _told.pop(config, None)

    set_implementation.is_watched = True  # type: ignore[attr-defined]
    config_class._attn_implementation = property(watched.fget, set_implementation)


def tell_of_another_kernel(module: nn.Module, kernel: str) -> None:
    """Logs, once a config, that a module runs another attention than ``kernel``, which it has."""
    config: Any = getattr(module, "config", None)
    name = getattr(config, "_attn_implementation_internal", None)
    if name is None or kernel in name or id(config) in _on_purpose:
        return
    told = _told.setdefault(config, set())
    if name in told:
        return
    told.add(name)
    line = _lines.get(config)
    _logger.warning(
        '%s runs the attention "%s" and not its implicit kernel, for its config says so%s; '
        'model.set_attn_implementation("%s") takes that back',
        type(module).__name__,
        name,
        f" since {line}" if line else "",
        kernel,
    )


def _line() -> str:
    """Returns the file and line outside of the code that hands settings on."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _HANDS_ON:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
