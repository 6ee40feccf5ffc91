"""Libraries that only some of this package needs, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["optional"]


def optional(module: str, purpose: str, install: str) -> Any:
    """The module of an optional library.

    Args:
        module: Its name, for example "matplotlib.figure".
        purpose: What needs it, the beginning of a sentence.
        install: What to hand to pip.

    Raises:
        ModuleNotFoundError: It is not installed; the message says how to install it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise  # it is there, but what it needs itself is not
        raise ModuleNotFoundError(
            f"{purpose} needs {library}: pip install {install}", name=library
        ) from None
