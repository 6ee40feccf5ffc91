"""What a model is called with, and the numbers that it gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Inputs", "call", "main_output"]

Inputs: TypeAlias = "Tensor | Mapping[str, Any]"
"""A model's only argument, or its keyword arguments by name."""


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Calls a model with tensors on its device, those of floating point in its dtype."""
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    for parameter in model.parameters():
        device = device or parameter.device
        if parameter.is_floating_point():
            dtype = parameter.dtype
            break

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype if x.is_floating_point() else None)

    if isinstance(inputs, Tensor):
        return model(moved(inputs))
    return model(**{name: moved(x) for name, x in inputs.items()})


def main_output(output: Any) -> Tensor | None:
    """The logits, or the last hidden state, or the first tensor of floating point; None: none."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        for name in ("logits", "last_hidden_state"):
            if isinstance(output.get(name), Tensor):
                return main_output(output[name])
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return next((x for x in map(main_output, output) if x is not None), None)
    return None
