"""The lines that a bug report needs: versions, libraries and kernels."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ikattn import _library


def cuda_kernels(build: dict[str, Any]) -> str:
    """Tells which kernels for GPUs a build has, and whether Hopper's own are in use."""
    if "no_cuda_reason" in build:
        return f"no: {build['no_cuda_reason']}"
    if not build["warpgroups"]:
        state = "not built"
    elif "-hopper" in os.environ.get("IKATTN_KERNELS", ""):
        state = "off (IKATTN_KERNELS)"
    elif torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        state = "on, but this GPU is another"
    else:
        state = "on"
    return f"for {build['cuda_architectures']}; those for Hopper alone: {state}"


def families() -> list[dict[str, Any]]:
    """Reads the ledger of CUDA kernels, of csrc/support/proven.h, and which of them are on.

    IKATTN_KERNELS with a family that there is not is a RuntimeError.
    """
    found: list[dict[str, Any]] = json.loads(torch.ops.ikattn.kernel_families())
    return found


def kernel_families() -> str:
    """Returns the families of CUDA kernels that are on, and how to turn on the others."""

    def named(family: dict[str, Any]) -> str:
        here = family["here"]
        return f"{family['name']} (this machine, on {here})" if here else str(family["name"])

    on, off = (
        ", ".join(named(family) for family in families() if family["on"] == is_on) or "none"
        for is_on in (True, False)
    )
    asked = os.environ.get("IKATTN_KERNELS")
    return f"on: {on}; off: {off} (IKATTN_KERNELS{f'={asked}' if asked else ' is not set'})"


def gpu() -> str:
    """Names the GPU that torch uses, and tells whether the library has kernels for it."""
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # no driver, or one that is too old
            return f"none that torch can use: {error}".splitlines()[0]
        return "none that torch can use"
    major, minor = torch.cuda.get_device_capability()
    reason: str = torch.ops.ikattn.why_no_kernels(torch.device("cuda"))
    state = "ikattn's kernels run on it" if not reason else f"no kernels of ikattn: {reason}"
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}; {state}"


def several(paths: list[str], warning: str) -> str:
    """Joins paths, and adds a warning where there is more than one."""
    return ", ".join(paths) + (f" ({len(paths)}: {warning})" if len(paths) > 1 else "")


def copies() -> list[str]:
    """Returns the folders of ikattn on sys.path, first the one that is imported."""
    here = Path(__file__).resolve().parent
    found = (Path(entry).resolve() / "ikattn" for entry in sys.path)
    others = {folder for folder in found if (folder / "__init__.py").exists()} - {here}
    return [str(here), *sorted(map(str, others))]


def openmp() -> list[str]:
    """Returns the files of the OpenMP runtimes that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ["unknown, for /proc is not mounted"]
    return sorted(set(re.findall(r"/\S*/lib(?:g|i)?omp[-.0-9a-f]*\.so\S*", maps)))


def info() -> str:
    """Versions, instruction set, CUDA and threads, one per line.

    ``ikattn.which_kernels`` says which kernels one call takes.

    Example:
        >>> import ikattn
        >>> print(ikattn.info())  # doctest: +ELLIPSIS
        ikattn           ...
    """
    build = json.loads(torch.ops.ikattn.build_info())
    rows = {
        "ikattn": _library.version(),
        "torch": f"{torch.__version__} (built for {build['torch']})",
        "built for torch": ", ".join(_library.built_for()),
        "Python": platform.python_version(),
        "compiler": build["compiler"],
        "instruction set": f"{torch.ops.ikattn.instruction_set()} (of {', '.join(build['isas'])})",
        "16-bit products": torch.ops.ikattn.sixteen_bit_instructions(),
        "linear time": torch.ops.ikattn.linear_time(),
        "deterministic": torch.ops.ikattn.deterministic(),
        "CUDA kernels": cuda_kernels(build),
        "CUDA families": "not built; " * ("no_cuda_reason" in build) + kernel_families(),
        "GPU": gpu(),
        "threads": str(torch.get_num_threads()),
        "OpenMP": several(openmp(), "two runtimes compete for the cores"),
        "package": several(copies(), "the first is imported"),
    }
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())
