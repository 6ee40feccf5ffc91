"""Tells, once, when a model leaves its implicit kernel, and which line made it do so.

Code of a library may set another attention in a model's config, as Whisper's ``generate`` does for
timestamps; the model then computes softmax without a word.
"""

from __future__ import annotations

import logging
import sys
from typing import Any
from weakref import finalize

from torch import nn

from ikattn.integrations.transformers.interface import (
    import_transformers,
    is_softmax_on_purpose,
)

_logger = logging.getLogger("ikattn")

# Modules whose frames hand a setting on, and did not decide on it.
_HANDS_ON = (
    "huggingface_hub.dataclasses",
    "transformers.configuration_utils",
    "transformers.modeling_utils",
    __name__,
)
_lines: dict[int, str] = {}  # file and line, by id of a config
_told: set[tuple[int, str]] = set()  # ids of configs, and attention implementations


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
            if id(config) not in _lines:
                finalize(config, _forget, id(config))
            _lines[id(config)] = _line()
        elif config._attn_implementation_internal == kernel:
            _forget(id(config))

    set_implementation.is_watched = True  # type: ignore[attr-defined]
    config_class._attn_implementation = property(watched.fget, set_implementation)


def tell_of_another_kernel(module: nn.Module, kernel: str) -> None:
    """Logs, once a config, that a module runs another attention than ``kernel``, which it has."""
    config: Any = getattr(module, "config", None)
    name = getattr(config, "_attn_implementation_internal", None)
    if name is None or kernel in name or is_softmax_on_purpose(config):
        return
    if (id(config), name) in _told:
        return
    if not any(number == id(config) for number, _ in _told):
        finalize(config, _forget, id(config))
    _told.add((id(config), name))
    line = _lines.get(id(config))
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


def _forget(number: int) -> None:
    _lines.pop(number, None)
    _told.difference_update([told for told in _told if told[0] == number])
