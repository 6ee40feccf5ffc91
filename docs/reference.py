"""Writes the pages of the site that are made from the code: the reference.

Python by task, the command line, the operators' schemas, and which kernels compute a call.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import ikattn
from ikattn.cli.command import _parser

VERSION = ikattn.__version__
# Modules that have public names, by what a reader wants to do.
TASKS = {
    "ikattn.ops": "Attend, with the operators",
    "ikattn.nn": "Attend, with modules",
    "ikattn.spectral": "Choose frequencies",
    "ikattn.conversion": "Convert a trained model",
    "ikattn.recorder": "Record a model",
    "ikattn.maps": "Read, save and draw maps",
    "ikattn.explain": "Explain a model's answer, compare models",
    "ikattn.parallel": "Use several devices",
    "ikattn.integrations.transformers": "Use Hugging Face transformers",
    "ikattn.integrations.pyg": "Use PyTorch Geometric",
    "ikattn.integrations.peft": "Use PEFT",
    "ikattn.integrations.opacus": "Use Opacus",
    "ikattn.integrations.timm": "Use timm",
    "ikattn.reference": "Check against the formula",
    "ikattn": "Ask about the installation",
}


def is_defined_in(module: ModuleType, name: str, value: Any) -> bool:
    return name[0] != "_" and getattr(value, "__module__", None) == module.__name__


def public_names(module: ModuleType) -> list[str]:
    """Returns the names of a module by which they are documented: the shortest that reach them."""
    names = []
    own = [name for name, value in vars(module).items() if is_defined_in(module, name, value)]
    for name in getattr(module, "__all__", own):
        is_short = name in ikattn.__all__ and getattr(ikattn, name) is getattr(module, name)
        names.append(f"ikattn.{name}" if is_short else f"{module.__name__}.{name}")
    return names


def found(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def results_of(value: Any) -> list[type]:
    """Returns the package's classes that a function returns, or that a class has as fields."""
    hints = getattr(value, "__annotations__", {})
    hints = list(hints.values()) if isinstance(value, type) else [hints.get("return")]
    known = vars(sys.modules[value.__module__])
    hints = [known.get(hint) if isinstance(hint, str) else hint for hint in hints]
    return [x for x in hints if isinstance(x, type) and x.__module__.startswith("ikattn.")]


def python_pages() -> dict[str, str]:
    """Returns a page for each task, and one that lists them. Each name is documented once.

    What public functions return is documented beside them.
    """
    modules = {room: import_module(room) for room in TASKS}
    for module in modules.values():
        for name in public_names(module):
            _NAMES.setdefault(id(found(name)), name)
    pages, seen = {}, {"ikattn.__version__"}
    for room, module in modules.items():
        names = [name for name in public_names(module) if name not in seen]
        for name in names:  # grows
            for result in results_of(found(name)):
                if id(result) not in _NAMES and result.__name__[0] != "_":
                    _NAMES[id(result)] = f"{result.__module__}.{result.__qualname__}"
                    names.append(_NAMES[id(result)])
        seen.update(names)
        listed = "\n   ".join(sorted(name.removeprefix("ikattn.") for name in names))
        title = TASKS[room]
        pages[f"{room}.rst"] = (
            f"{title}\n{'=' * len(title)}\n\n.. automodule:: {room}\n   :no-members:\n\n"
            f".. currentmodule:: ikattn\n\n"
            f".. autosummary::\n   :toctree: names\n   :nosignatures:\n\n   {listed}\n"
        )
    toctree = "\n   ".join(TASKS)
    pages["python.rst"] = (
        "Python, by task\n===============\n\nEvery public name of the package has a page of its "
        f"own, with the examples that use it.\n\n.. toctree::\n   :maxdepth: 2\n\n   {toctree}\n"
    )
    return pages


_NAMES: dict[int, str] = {}  # id of a public object -> the name that it is documented by


def documented_name(target: str, module: str | None) -> tuple[str | None, bool]:
    """Finds the name that an object is documented by, and whether there is an object at all.

    Args:
        target: A path that leads to it in Python, or its last part.
        module: The module of the page that has the reference.
    """
    parts = target.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    first = next((name for name in prefixes if name in sys.modules), parts[0])
    rest = target.removeprefix(first).split(".")[1:]
    holders = [import_module(name) for name in (module, "builtins") if name]
    holders += [held for name, held in list(sys.modules.items()) if name.startswith("ikattn")]
    values = [sys.modules[first]] if first in sys.modules else []
    values += [vars(holder)[first] for holder in holders if first in vars(holder)]
    exists = False
    for value in values:
        for count in range(len(rest) + 1):
            if id(value) in _NAMES:
                return ".".join([_NAMES[id(value)], *rest[count:]]), True
            if count == len(rest):
                exists = True
            elif hasattr(value, rest[count]):
                value = getattr(value, rest[count])
            else:
                break
    return None, exists


def command_line() -> str:
    """Returns the help of `python -m ikattn` and of each subcommand."""
    os.environ["COLUMNS"] = "88"
    parser = _parser()
    page = ["# Command line", "", "```text", parser.format_help().rstrip(), "```", ""]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                page += [f"## {name}", "", "```text", command.format_help().rstrip(), "```", ""]
    return "\n".join(page)


def schemas() -> str:
    """Returns the schema of every operator in torch.ops.ikattn."""
    known = sorted(
        str(schema)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("ikattn::")
    )
    page = [
        "# Operators of torch.ops.ikattn",
        "",
        "Exported programs and C++ see these names. From Python, call the functions of",
        "{doc}`ikattn.ops`: they have defaults and documentation.",
        "",
    ]
    for schema in known:
        page += ["```text", schema.replace(", *", ",\n  *"), "```", ""]
    return "\n".join(page)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"key_bias": torch.zeros(1)},
    "of pairs": {"attn_mask": torch.ones(1, dtype=torch.bool)},
    "dropout": {"dropout_p": 0.1},
}


def kernels() -> str:
    """Returns the table of the kernels that `which_kernels` names, as this build answers."""
    page = [
        "# Which kernels compute a call",
        "",
        "`ikattn.which_kernels` answered this while the site was built, for 8 heads of 64 with 32 "
        f"frequencies, on a processor with {unit()}. Ask it about your own call: it computes "
        "nothing.",
        "",
        "| tokens | data type | mask | forward | backward |",
        "|---|---|---|---|---|",
    ]
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for length, dtype, mask in product((512, 16384), types, MASKS):
        q = torch.empty(1, 1, 1, 64, dtype=dtype).expand(1, 8, length, 64)
        w = torch.empty(8, 64, 32, dtype=dtype)
        options = {
            name: value.expand(*([1, 1, length] if name == "key_bias" else [1, 1, length, length]))
            if isinstance(value, torch.Tensor)
            else value
            for name, value in MASKS[mask].items()
        }
        if "key_bias" in options:
            options["key_bias"] = options["key_bias"].to(dtype)
        passes = ikattn.which_kernels(q, q, q, w, w, **options)
        kind = str(dtype).removeprefix("torch.")
        page.append(f"| {length} | {kind} | {mask} | {passes.forward} | {passes.backward} |")
    page += [
        "",
        "## On a GPU",
        "",
        "Which GPU has last passed the tests of each family of kernels. A family that no GPU has "
        "passed is off until `python -m ikattn selftest --enable` proves it on yours.",
        "",
        "```{include} ../../guide/cuda.md",
        ':start-after: "<!-- tools/ledger.py writes this -->"',
        ':end-before: "<!-- to here -->"',
        "```",
        "",
    ]
    return "\n".join(page)


def unit() -> str:
    q, w = torch.empty(1, 1, 8, 8), torch.empty(1, 8, 8)
    return ikattn.which_kernels(q, q, q, w).forward.unit


def headers() -> str:
    """Returns the public C++ headers, whose comments are their documentation."""
    include = Path(ikattn.__file__).parents[2] / "csrc/include/ikattn"
    page = ["# C++ headers", "", "Link `ikattn::ikattn`; gradients work as in Python.", ""]
    for header in sorted(include.glob("*.h")):
        page += [f"## `<ikattn/{header.name}>`", ""]
        page += [f"```{{literalinclude}} ../../../csrc/include/ikattn/{header.name}"]
        page += [":language: cpp", "```", ""]
    return "\n".join(page)


def write_pages(folder: Path) -> None:
    """Writes the pages that differ from what is there."""
    pages = python_pages()
    pages["command_line.md"] = command_line()
    pages["schemas.md"] = schemas()
    pages["kernels.md"] = kernels()
    pages["headers.md"] = headers()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
