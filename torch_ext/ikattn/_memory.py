"""Memory that is missing in what is composed of torch's operators: who asked for it, and what for.

The operators in C++ tell this themselves (csrc/support/memory.h).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Words of torch's errors where memory is missing: on the CPU, on a GPU, and for sizes beyond any.
_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "size calculation")


@contextmanager
def memory_for(function: str, what: str) -> Iterator[None]:
    """Opens a context in which missing memory is told with ``function`` and ``what`` it was for.

    Raises:
        torch.OutOfMemoryError: In place of what torch raises, on the CPU a RuntimeError. Other
            errors, and those which already say what the memory was for, pass.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        is_of_memory = isinstance(error, torch.OutOfMemoryError) or any(
            part in text for part in _OF_MEMORY
        )
        if not is_of_memory or ": no memory for " in text:
            raise
        raise torch.OutOfMemoryError(f"{function}: no memory for {what}: {text}") from error


def takes_memory_for(
    what: str, *, function: str | None = None
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorates a function with :func:`memory_for`, under its own name where none is given."""

    def decorate(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(call)
        def decorated(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
            if torch.compiler.is_compiling():  # whose graphs hold no handlers
                return call(*arguments, **options)
            with memory_for(function or call.__name__, what):
                return call(*arguments, **options)

        return decorated

    return decorate


def free_memory(device: torch.device) -> int | None:
    """Returns the bytes that tensors may still take on a device; None where that is not known.

    On the CPU what Linux calls available, and no more than the limit of a container (cgroup 2)
    leaves. On CUDA also what torch's allocator holds and no tensor uses.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free = int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    left = _left_in_group(Path("/sys/fs/cgroup"))
    return free if left is None else min(free, left)


def _left_in_group(folder: Path) -> int | None:
    """Returns the memory that a container's limit leaves, its caches counted as free."""
    try:
        limit = int((folder / "memory.max").read_text())  # "max": none
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = ("inactive_file", "active_file", "slab_reclaimable")
        return max(0, limit - used + sum(int(stat[name]) for name in cache))
    except (OSError, ValueError, KeyError):
        return None
