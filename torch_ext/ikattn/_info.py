"""What is installed and what runs: the lines a bug report needs."""

from __future__ import annotations

import json
import os
import platform

import torch

from ikattn import _library

__all__ = ["info"]


def cuda_kernels(are_there: bool, warpgroups: bool) -> str:
    """What the library holds for GPUs, and what of it is in use."""
    if not are_there:
        return "no"
    if not warpgroups:
        return "yes, without those for Hopper alone"
    in_use = os.environ.get("IKATTN_WARPGROUPS") == "1"
    return "yes, with those for Hopper alone" + ("" if in_use else " (IKATTN_WARPGROUPS=1 to use)")


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
        "CUDA kernels": cuda_kernels(build["cuda"], build["warpgroups"]),
        "threads": str(torch.get_num_threads()),
        "C++ package": _library.cmake_prefix_path(),
    }
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())
