"""Writes the pages of the site that are made from the code: the reference.

Python by task, the command line, C++ headers, the operators' schemas, which kernels compute a call,
and which models are recorded.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import torch

import ikattn
from ikattn.cli.command import _parser

ROOT = Path(__file__).resolve().parents[1]
VERSION = ikattn.__version__
DOXYGEN = shutil.which("doxygen")  # None: headers are shown as they are written
DOXYFILE = {
    **dict.fromkeys(("GENERATE_XML", "EXTRACT_ALL", "QUIET"), "YES"),
    **dict.fromkeys(("MACRO_EXPANSION", "EXPAND_ONLY_PREDEF"), "YES"),
    **dict.fromkeys(("GENERATE_HTML", "GENERATE_LATEX", "AUTOLINK_SUPPORT"), "NO"),
    "PREDEFINED": '"TORCH_MODULE(name)=" "TORCH_ARG(T, name)=T name"',
    "WARNINGS": "NO",  # it does not know all of C++
}
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
    hints = [getattr(hint, "__forward_arg__", hint) for hint in hints]  # of named tuples
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
        names.sort(key=lambda name: name.rpartition(".")[2].lower())
        listed = "\n   ".join(name.removeprefix("ikattn.") for name in names)
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


MASKS = ("none", "causal", "padding", "of pairs", "dropout")
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def options_of(mask: str, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the options of a call with such a mask. Nothing is written into their memory."""
    if mask == "padding":
        return {"key_bias": torch.empty(1, 8, length, dtype=dtype)}
    if mask == "of pairs":
        return {"attn_mask": torch.empty(1, 1, length, length, dtype=torch.bool)}
    return {"causal": {"is_causal": True}, "dropout": {"dropout_p": 0.1}}.get(mask, {})


def kernels() -> str:
    """Returns the tables of the kernels that `which_kernels` names, as this build answers."""
    page = [
        "# Which kernels compute a call",
        "",
        "`ikattn.which_kernels` answered this while the site was built, for 8 heads of 64 with 32 "
        "frequencies. Ask it about your own call: it computes nothing.",
        "",
    ]
    for device, length in product(("cpu", "cuda"), (512, 16384)):
        q, w = (torch.empty(size) for size in ((1, 8, length, 64), (8, 64, 32)))
        if ikattn.which_kernels(q, q, q, w, w, device=device).forward.unit == "none":
            continue
        names = [str(dtype).removeprefix("torch.") for dtype in TYPES]
        page += [f"## {length} tokens on {device.upper()}", "", f"| mask | {' | '.join(names)} |"]
        page += ["|---" * (1 + len(TYPES)) + "|"]
        for mask in MASKS:
            cells = []
            for dtype in TYPES:
                x, v = (torch.empty_like(one, dtype=dtype) for one in (q, w))
                options = options_of(mask, length, dtype)
                passes = ikattn.which_kernels(x, x, x, v, v, device=device, **options)
                said = [f"{one.algorithm}, `{one.unit}`" for one in passes]
                cells.append(said[0] if said[0] == said[1] else "; backward: ".join(said))
            page.append(f"| {mask} | {' | '.join(cells)} |")
        page.append("")
    page += [
        "## Families of kernels for GPUs",
        "",
        "The GPU that has last passed the tests of each family. A family that no GPU has passed is "
        "off until `python -m ikattn selftest --enable` proves it on yours.",
        "",
        "```{include} ../../guide/cuda.md",
        ':start-after: "<!-- tools/ledger.py writes this -->"',
        ':end-before: "<!-- to here -->"',
        "```",
        "",
    ]
    return "\n".join(page)


def models() -> str:
    """Returns the lists of model types that tests record."""
    families = runpy.run_path(str(ROOT / "tests/python/support/families.py"))
    kinds = {
        "Blocks with the norm before the attention": "PRE",
        "Blocks with the norm after the residual": "POST",
        "Attention without its block: maps with the residual are left out": "ALONE",
        "Attention that its module writes out as a softmax and a product": "WRITTEN_OUT",
    }
    page = [
        "# Models that are recorded",
        "",
        "`ikattn.record` finds the block around an attention by what its tensors add up to. The "
        "tests hold a small model of each of these types of transformers to explicit sums. BERT, "
        "BART, GPT-2, OPT, T5, Llama and their like are tested one by one.",
        "",
    ]
    for title, name in kinds.items():
        page += [f"## {title}", "", ", ".join(f"`{one}`" for one in families[name]), ""]
    return "\n".join([*page, ""])


def as_doxygen(header: str) -> str:
    """Returns a header whose comments doxygen reads: indented lines stay as they are."""
    made, is_indented = [], False
    for line in ["// @file", *header.splitlines()]:
        comment = re.match(r"( *)//(?: |$)(.*)", line)
        was_indented, is_indented = is_indented, bool(comment and comment[2].startswith("  "))
        if is_indented != was_indented:
            made.append("/// @code{.unparsed}" if is_indented else "/// @endcode")
        trailing = re.sub(r"(\S +)// ", r"\1///< ", line)
        made.append(f"{comment[1]}/// {comment[2]}" if comment else trailing)
    return "\n".join([*made, ""])


def declared(folder: Path, header: str) -> list[str]:
    """Returns directives for what a header declares, in its order, as doxygen has found it."""
    found = []
    for file in (folder / "xml").glob("*.xml"):
        tree = ElementTree.parse(file)
        for kind in ("compounddef", "memberdef"):
            for one in tree.iter(kind):
                place, what = one.find("location"), one.get("kind")
                name = one.findtext("compoundname") or one.findtext("qualifiedname")
                is_public = what in ("class", "struct") or (
                    kind == "memberdef" and file.name.startswith("namespace")
                )
                if is_public and place is not None and Path(place.get("file", "")).name == header:
                    types = [x.find("type") for x in one.findall("param")]
                    if what == "function":
                        name += f"({', '.join(''.join(x.itertext()) for x in types)})"
                    members = ":members:\n" if kind == "compounddef" else ""
                    told = f"```{{doxygen{what}}} {name}\n{members}```"
                    found.append((int(place.get("line", 0)), told))
    return list(dict.fromkeys(told for _, told in sorted(found)))


def headers(folder: Path) -> str:
    """Returns the page of the public C++ headers, of which doxygen reads a copy in a folder."""
    page = ["# C++ headers", "", "Link `ikattn::ikattn`; gradients work as in Python.", ""]
    shown = sorted((ROOT / "csrc/include/ikattn").glob("*.h"))
    if DOXYGEN:
        folder.mkdir(parents=True, exist_ok=True)
        for header in shown:
            (folder / header.name).write_text(as_doxygen(header.read_text()))
        options = {"INPUT": folder, "OUTPUT_DIRECTORY": folder, **DOXYFILE}
        doxyfile = "\n".join(f"{name}={value}" for name, value in options.items())
        subprocess.run([DOXYGEN, "-"], input=doxyfile, text=True, check=True)
    for header in shown:
        page += [f"## `<ikattn/{header.name}>`", ""]
        if DOXYGEN:
            sections = ":sections: briefdescription detaileddescription define"
            page += ["```{doxygenfile} " + header.name, sections, "```"]
            page += declared(folder, header.name)
        else:
            page += [f"```{{literalinclude}} ../../../csrc/include/ikattn/{header.name}"]
            page += [":language: cpp", "```"]
        page += [""]
    return "\n".join(page)


def write_pages(folder: Path) -> None:
    """Writes the pages that differ from what is there."""
    pages = python_pages()
    pages["command_line.md"] = command_line()
    pages["schemas.md"] = schemas()
    pages["kernels.md"] = kernels()
    pages["headers.md"] = headers(folder.parents[3] / "headers")
    pages["models.md"] = models()
    folder.mkdir(parents=True, exist_ok=True)
    for page in folder.glob("names/*.rst"):  # of names that are gone
        if not any(page.stem in text for text in pages.values()):
            page.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
