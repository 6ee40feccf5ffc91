"""The device of tests that every device must pass: IKATTN_TEST_DEVICE, for example cuda."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DEVICE = os.environ.get("IKATTN_TEST_DEVICE")


def on_test_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called there: tensors go there, and results, as gradients, come back."""
    if _DEVICE is None:
        return function
    device = torch.device(_DEVICE)
    reason = torch.ops.ikattn.why_no_kernels(device)
    if reason:
        raise RuntimeError(f"IKATTN_TEST_DEVICE={_DEVICE}: {reason}")

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
