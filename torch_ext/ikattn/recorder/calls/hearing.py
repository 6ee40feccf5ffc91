"""Functions that modules call by their names, heard while models are recorded.

Such a function is replaced by one that calls it, so that outputs stay what they are, and then tells
the recordings.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from torch import nn


class Told(NamedTuple):
    """A call of a function; a tensor that it writes into is as it was before."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


Heard: TypeAlias = Callable[[Told], None]
Place: TypeAlias = tuple[dict[str, Any], str]  # a namespace, and a name in it

_lock = threading.Lock()
_heard: dict[str, list[Heard]] = {}  # by kind of function
# Namespaces with the functions that stood there, by kind, by the namespace's id and the name.
_replaced: dict[str, dict[tuple[int, str], tuple[dict[str, Any], Any]]] = {}
_running = threading.local()  # .kinds: those of which a call runs, whose own calls are not told


def methods_of(kind: type) -> list[Any]:
    """Returns the functions of a class of modules that are its own, without decorators."""
    kinds = [each for each in kind.__mro__ if each not in (nn.Module, object)]
    methods = (method for each in kinds for method in vars(each).values())
    return [inspect.unwrap(method) for method in methods if inspect.isfunction(method)]


@contextlib.contextmanager
def hearing(kind: str, places: Iterable[Place], heard: Heard) -> Iterator[None]:
    """For the time of the block, tells ``heard`` of each call.

    Functions whose names end in "_state_update" write a state into their first argument.
    """
    with _lock:
        listeners = _heard.setdefault(kind, [])
        listeners.append(heard)
        replaced = _replaced.setdefault(kind, {})
        for names, name in places:
            if (id(names), name) not in replaced:
                replaced[id(names), name] = names, names[name]
                names[name] = _telling(kind, name, names[name], listeners)
    try:
        yield
    finally:
        with _lock:
            listeners.remove(heard)
            if not listeners:
                for (_, name), (names, before) in replaced.items():
                    if getattr(names.get(name), "ikattn_tells", False):
                        names[name] = before
                replaced.clear()


def _telling(
    kind: str, name: str, function: Callable[..., Any], listeners: list[Heard]
) -> Callable[..., Any]:
    def tell(*args: Any, **kwargs: Any) -> Any:
        kinds: set[str] = vars(_running).setdefault("kinds", set())
        if kind in kinds:
            return function(*args, **kwargs)
        told, writes = args, name.endswith("_state_update")
        if writes:
            told = (args[0].clone(), *args[1:])
        kinds.add(kind)
        try:
            output = function(*args, **kwargs)
        finally:
            kinds.remove(kind)
        for heard in tuple(listeners):
            heard(Told(name, told, kwargs, (output, args[0].clone()) if writes else output))
        return output

    tell.ikattn_tells = True  # type: ignore[attr-defined]
    return tell
