"""Libraries that only some of this package needs, imported when they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def optional(module: str, purpose: str, install: str) -> Any:
    """Imports the module of an optional library, or raises ModuleNotFoundError.

    ``purpose`` begins the error's sentence, and ``install`` is what to hand to pip.
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


def when_imported(module: str, register: Callable[[], object]) -> None:
    """Calls a function as soon as a library is imported: now, or when somebody imports it.

    A model that is unpickled or loaded names attention functions of this package. So they are
    registered whoever imports that library, and importing this package does not import it.
    ImportError and AttributeError of the function are ignored: the library is too old for it.
    """
    if module in sys.modules:
        with suppress(ImportError, AttributeError):
            register()
    else:
        sys.meta_path.insert(0, _Watch(module, register))


class _Watch(MetaPathFinder):
    """Finds one module as the finders after it do, and calls a function after it has been run."""

    def __init__(self, module: str, register: Callable[[], object]) -> None:
        self._module = module
        self._register = register

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                with suppress(ImportError, AttributeError):
                    self._register()

            loader.exec_module = run_and_register
        return spec
