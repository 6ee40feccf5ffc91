"""Hooks of a recording, which copies and pickles of the model leave behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


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


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
