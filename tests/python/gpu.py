"""What the tests on a GPU share. Importing it skips them where they cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from samples import LAYOUTS, Arguments

if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU", allow_module_level=True)
if reason := torch.ops.ikattn.why_no_kernels(torch.device("cuda")):
    pytest.skip(reason, allow_module_level=True)


def on_gpu(arguments: dict[str, Any], layout: str = "contiguous") -> dict[str, Any]:
    """The same call there. A copy between devices is dense: a sample's layout comes after it."""

    def moved(argument: Any) -> Any:
        if isinstance(argument, ikattn.NormStats):
            return ikattn.NormStats(
                argument.weight.cuda(), argument.scale.cuda(), argument.centered
            )
        if not isinstance(argument, Tensor):
            return argument
        there = argument.cuda()
        return LAYOUTS[layout](there) if there.is_floating_point() else there

    return {name: moved(argument) for name, argument in arguments.items()}


def drawn_on_gpu(
    batch: int, heads: int, queries: int, keys: int, d_v: int, frequencies: int, dtype: torch.dtype
) -> Arguments:
    torch.manual_seed(0)
    sizes = {"query": (queries, 64), "key": (keys, 64), "value": (keys, d_v)}
    call: Arguments = {
        name: torch.randn(batch, heads, *size, device="cuda", dtype=dtype)
        for name, size in sizes.items()
    }
    w1, w2 = torch.randn(2, heads, 64, frequencies, device="cuda") * 0.3 / 8
    return call | {"w1": w1, "w2": w2}
