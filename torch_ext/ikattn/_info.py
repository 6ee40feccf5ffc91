"""What is installed and what runs: the lines a bug report needs."""

from __future__ import annotations

import json
import os
import platform

import torch

from ikattn import _library

__all__ = ["info"]


def cuda_kernels(architectures: str | None, warpgroups: bool) -> str:
    """What the library holds for GPUs, and whether Hopper's own kernels are in use.

    Args:
        architectures: As CMake names them; None: there are no kernels.
        warpgroups: Whether there are kernels of warpgroups, for compute capability 9.0 alone.
    """
    if architectures is None:
        return "no"
    if not warpgroups:
        state = "not built"
    elif os.environ.get("IKATTN_WARPGROUPS") != "1":
        state = "off (IKATTN_WARPGROUPS=1 turns them on)"
    elif torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        state = "on, but this GPU is another"
    else:
        state = "on"
    return f"for {architectures}; those for Hopper alone: {state}"


def info() -> str:
    """Versions, instruction set, CUDA and threads, one per line.

    ``ikattn.why_not_fast`` says which kernels one call takes.

    Example:
        >>> import ikattn
        >>> print(ikattn.info())  # doctest: +ELLIPSIS
        ikattn           ...
    """
    build = json.loads(torch.ops.ikattn.build_info())
    rows = {
        "ikattn": _library.load(),
        "torch": f"{torch.__version__} (built for {build['torch']})",
        "Python": platform.python_version(),
        "compiler": build["compiler"],
        "instruction set": f"{torch.ops.ikattn.instruction_set()} (of {', '.join(build['isas'])})",
        "16-bit products": torch.ops.ikattn.sixteen_bit_instructions(),
        "linear time": torch.ops.ikattn.linear_time(),
        "CUDA kernels": cuda_kernels(build["cuda_architectures"], build["warpgroups"]),
        "threads": str(torch.get_num_threads()),
        "C++ package": _library.cmake_prefix_path(),
    }
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())
