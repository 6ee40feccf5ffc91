"""Shared parts of the tests on a GPU. Importing it skips them where they cannot run.

IKATTN_TEST_DEVICE=interpreter: without a GPU, in the interpreter (devices.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from devices import IN_THE_INTERPRETER
from ikattn._info import families
from samples import LAYOUTS, Arguments

DEVICE = "interpreter" if IN_THE_INTERPRETER else "cuda"

if not IN_THE_INTERPRETER:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU", allow_module_level=True)
    if reason := torch.ops.ikattn.why_no_kernels(torch.device("cuda")):
        pytest.skip(reason, allow_module_level=True)

needs_a_gpu = pytest.mark.skipif(IN_THE_INTERPRETER, reason="the interpreter is no GPU")
large = pytest.mark.skipif(IN_THE_INTERPRETER, reason="takes the interpreter minutes")


@contextlib.contextmanager
def memory_limited_to(free: int) -> Iterator[None]:
    """Tensors can have so many bytes there, beside what they hold."""
    if IN_THE_INTERPRETER:
        torch.ops.ikattn_interpreter.limit_memory(free)
    else:
        held = torch.cuda.memory_reserved()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((held + free) / total)
    try:
        yield
    finally:
        if IN_THE_INTERPRETER:
            torch.ops.ikattn_interpreter.limit_memory(-1)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0)


def on_gpu(arguments: dict[str, Any], layout: str = "contiguous") -> dict[str, Any]:
    """Moves a call. A copy between devices is dense: a sample's layout comes after it."""

    def moved(argument: Any) -> Any:
        if isinstance(argument, ikattn.maps.NormStats):
            return ikattn.maps.NormStats(
                argument.weight.to(DEVICE), argument.scale.to(DEVICE), argument.centered
            )
        if not isinstance(argument, Tensor):
            return argument
        there = argument.to(DEVICE)
        return LAYOUTS[layout](there) if there.is_floating_point() else there

    return {name: moved(argument) for name, argument in arguments.items()}


def drawn_on_gpu(
    batch: int, heads: int, queries: int, keys: int, d_v: int, frequencies: int, dtype: torch.dtype
) -> Arguments:
    torch.manual_seed(0)
    sizes = {"query": (queries, 64), "key": (keys, 64), "value": (keys, d_v)}
    call: Arguments = {
        name: torch.randn(batch, heads, *size, device=DEVICE, dtype=dtype)
        for name, size in sizes.items()
    }
    w1, w2 = torch.randn(2, heads, 64, frequencies, device=DEVICE) * 0.3 / 8
    return call | {"w1": w1, "w2": w2}


def assert_on_tensor_cores(call: Arguments) -> None:
    """That a call goes there; of the interpreter's device the library cannot be asked."""
    if not IN_THE_INTERPRETER:
        tensors = [call[name] for name in ("query", "key", "value", "w1", "w2")]
        choice = ikattn.which_kernels(*tensors, is_causal=call.get("is_causal", False)).forward
        assert choice.unit not in ("none", "cuda_cores"), choice


def turn(patch: pytest.MonkeyPatch, setting: str) -> None:
    """Turns families of kernels on and off, beside what the environment says: ``"-int8"``."""
    patch.setenv("IKATTN_KERNELS", f"{os.environ.get('IKATTN_KERNELS', '')},{setting}")


def is_on(family: str) -> bool:
    """Whether calls take a family of kernels, as the environment and the ledger have it."""
    return any(found["on"] for found in families() if found["name"] == family)
