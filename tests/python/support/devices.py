"""The device of tests that every device must pass: IKATTN_TEST_DEVICE, for example cuda.

"interpreter" is a device of CUDA's kernels without a GPU: they run in csrc/interpreter. Its
library is IKATTN_INTERPRETER_DEVICE, or the one that was built last (make full-interpreter).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import ikattn  # noqa: F401  its library is what the device's is linked to

DEVICE = os.environ.get("IKATTN_TEST_DEVICE", "cpu")
IN_THE_INTERPRETER = DEVICE == "interpreter"


def _library_of_interpreter() -> Path:
    if given := os.environ.get("IKATTN_INTERPRETER_DEVICE"):
        return Path(given)
    build = Path(__file__).parents[3] / "build"
    built = list(build.glob("*/tests/cpp/kernels/libikattn_interpreter_device.so"))
    if not built:
        raise RuntimeError(
            "IKATTN_TEST_DEVICE=interpreter: there is no library of it, run make full-interpreter"
        )
    return max(built, key=lambda library: library.stat().st_mtime)


def _load_interpreter() -> None:
    torch.ops.load_library(_library_of_interpreter())
    # torch calls these of a device's module. Its random numbers are those of the CPU.
    module = ModuleType("torch.interpreter")
    calls = {
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
    }
    vars(module).update(calls)
    torch._register_device_module("interpreter", module)


if IN_THE_INTERPRETER:
    _load_interpreter()


def why_no_kernels(device: torch.device) -> str:
    """Empty: they run there."""
    return "" if IN_THE_INTERPRETER else torch.ops.ikattn.why_no_kernels(device)


def on_test_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called there: tensors go there, and results, as gradients, come back."""
    if DEVICE == "cpu":
        return function
    device = torch.device(DEVICE)
    reason = why_no_kernels(device)
    if reason:
        raise RuntimeError(f"IKATTN_TEST_DEVICE={DEVICE}: {reason}")

    def moved(argument: Any, to: torch.device | str) -> Any:
        return argument.to(to) if isinstance(argument, Tensor) else argument

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        there = [moved(argument, device) for argument in arguments]
        result = function(*there, **{name: moved(x, device) for name, x in options.items()})
        if isinstance(result, tuple):
            return tuple(moved(each, "cpu") for each in result)
        return moved(result, "cpu")

    return call
