"""Hooks of a recording, which copies and pickles of the model leave behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Hook:
    """A hook that is one of this process and this model alone.

    A copy of the model, by deepcopy or pickle, gets a hook in its place that does nothing.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_nothing,)


def has_others_hooks(module: nn.Module) -> bool:
    """Whether somebody else than a recording hears or changes the calls of a module."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(isinstance(hook, Hook) for hook in hooks)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
