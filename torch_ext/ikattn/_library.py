"""Finds, checks and loads the shared library that registers the operators.

There is one for each minor version of torch, within which torch's C++ interface holds: another
would fail to load with an undefined symbol, or crash later. ``torch-2.13`` serves any build of
that version on the CPU, ``torch-2.13+cu13`` one with that major version of CUDA. All share the
libraries of kernels.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent
# Where the header of an ELF file of 64 bits tells the offset, the entry and the number of sections.
_SECTIONS = ((40, 48), (58, 60), (60, 62))
_BUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."


def load() -> str:
    """Loads the library for this torch, or raises ImportError, and returns its version."""
    library = library_for(torch.__version__, torch.version.cuda, _PACKAGE / "lib")
    kernels = ["libikattn_kernels.so"]
    if "+cu" in library.parent.name:
        kernels.append("libikattn_cuda_kernels.so")
    for file in (*(_PACKAGE / "lib" / name for name in kernels), library):
        refuse_cut_short(file)
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise ImportError(
            f"ikattn's {library} does not load into torch {torch.__version__}: {error}. "
            "It was compiled for a release of torch from PyPI: for another build of torch "
            f"(nightly, ROCm, from source), build ikattn in its source tree: {_BUILD}"
        ) from error
    return version()


def library_for(running: str, cuda: str | None, folder: Path) -> Path:
    """Returns the library of operators for a build of torch: one with its CUDA, where there is one.

    The version of torch is such as "2.13.0+cpu", that of its CUDA "13.0", and the folder holds
    ``torch-2.13/libikattn.so`` and the like. ImportError says which there are, and how to build
    one.
    """
    series = ".".join(running.split(".")[:2])
    with_cuda = [f"torch-{series}+cu{cuda.partition('.')[0]}"] if cuda else []
    for name in (*with_cuda, f"torch-{series}"):
        library = folder / name / "libikattn.so"
        if library.exists():
            return library
    there = built_for(folder)
    if not there:
        raise ImportError(
            f"ikattn's library has not been built: {library} is missing. "
            "In ikattn's source tree, run: pip install --no-build-isolation ."
        )
    raise ImportError(
        f"ikattn was built for torch {', '.join(there)}, but this is torch {running}. "
        f"To build it for this torch, in ikattn's source tree, run: {_BUILD}"
    )


def refuse_cut_short(library: Path) -> None:
    """Raises ImportError where a library ends before its table of sections, which is the last.

    The loader maps a file that was cut short, and the process dies later of a bus error.
    """
    again = "Install ikattn again: pip install --force-reinstall --no-deps, and the wheel"
    if not library.exists():
        raise ImportError(f"{library} is missing. {again}")
    with library.open("rb") as file:
        head = file.read(64)
    start, entry, number = (int.from_bytes(head[a:b], "little") for a, b in _SECTIONS)
    size = library.stat().st_size
    if size < max(64, start + entry * number):
        raise ImportError(
            f"{library} was cut short: it has {size} bytes of {start + entry * number}. {again}"
        )


def built_for(folder: Path = _PACKAGE / "lib") -> list[str]:
    """Returns the builds of torch that there is a library for, such as "2.13" and "2.13+cu13"."""
    names = (path.parent.name for path in folder.glob("torch-*/libikattn.so"))
    series = (name.removeprefix("torch-") for name in names)
    return sorted(series, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def version() -> str:
    """Returns the version of the library that is loaded."""
    built: dict[str, str] = json.loads(torch.ops.ikattn.build_info())
    return built["version"]


def cmake_prefix_path() -> str:
    """Returns the directory for CMAKE_PREFIX_PATH in which find_package(ikattn) finds ikattn.

    LibTorch is found too where torch is installed beside ikattn, as pip does; otherwise add
    torch.utils.cmake_prefix_path. ``python -m ikattn cmake-prefix-path`` prints both.
    """
    return str(_PACKAGE)
