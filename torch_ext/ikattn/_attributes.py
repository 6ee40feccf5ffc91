"""Attributes that objects have for the time of a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def having(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Gives an attribute of objects a value for the time of the block."""
    before = [(x, getattr(x, name)) for x in objects]
    try:
        for x, _ in before:
            setattr(x, name, value)
        yield
    finally:
        for x, own in before:
            setattr(x, name, own)
