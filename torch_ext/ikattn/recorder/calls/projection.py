"""Out-projections as linear maps, whatever they are made of.

Sizes: H heads, d_v head size of value, D model size.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ikattn._precision import widened
from ikattn.nn.parameter_groups import having
from ikattn.recorder.calls.hooks import has_others_hooks

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_thread = threading.local()


class Projection(NamedTuple):
    """A linear map: weight ``[D, H d_v]``, bias ``[D]`` or None."""

    weight: Tensor
    bias: Tensor | None

    def after(self, before: Projection) -> Projection:
        """Returns this map applied after another, which mixes no numbers."""
        weight = widened(self.weight)
        bias = self.bias
        if before.bias is not None:
            bias = weight @ before.bias + (0 if bias is None else widened(bias))
        return Projection(weight * before.weight.diagonal(), bias)

    def of_columns(self, columns: Tensor) -> Projection:
        """Returns this map for inputs that stand in some of its columns."""
        return Projection(self.weight[:, columns], self.bias)


def is_probing() -> bool:
    """Whether this thread is calling a module to learn what it computes: no part of the model's."""
    return getattr(_thread, "probing", False)


def describe(module: nn.Module) -> str:
    """The class of a module, with the library it is from."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def plain_projection(module: nn.Module) -> Projection | None:
    """The parameters of a module that computes nothing but ``x W^T + b``; None of another.

    Another may hold quantised, sharded or offloaded weights, adapters, parametrisations, hooks, or
    a forward of its own.
    """
    is_conv = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transfo")
    if type(module) not in (nn.Linear, NonDynamicallyQuantizableLinear) and not is_conv:
        return None
    if "forward" in vars(module) or has_others_hooks(module):
        return None
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if not isinstance(weight, Tensor) or not is_plain(weight):
        return None
    if bias is not None and not is_plain(bias):
        return None
    return Projection(weight.mT if is_conv else weight, bias)


def effective_projection(module: nn.Module, width: int, like: Tensor, layer: str) -> Projection:
    """Returns a module's linear map: its output for the identity less its output for zero.

    Of ``width`` H d_v inputs, with type and device of ``like``; errors name the attention,
    ``layer``.

    Raises:
        TypeError: The module cannot be applied to ``[1, width, width]``.
    """
    plain = plain_projection(module)
    if plain is not None:
        return plain
    identity = torch.eye(width, dtype=like.dtype, device=like.device)
    rows = torch.cat([identity, identity.new_zeros(1, width)])
    with probing(module):
        try:
            made = module(rows.unsqueeze(0))
        except Exception as error:
            raise TypeError(
                f"record: the out-projection of {layer}, a {describe(module)}, must be a linear "
                f"map of [1, L, {width}], got an error when it was applied: {error}. layers=... "
                "leaves the layer out"
            ) from error
    if not isinstance(made, Tensor) or made.dim() != 3 or made.shape[:2] != (1, width + 1):
        got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise TypeError(
            f"record: the out-projection of {layer}, a {describe(module)}, must make a tensor "
            f"[1, L, D] of [1, L, {width}], got {got}. layers=... leaves the layer out"
        )
    made = widened(made[0])
    return Projection((made[:-1] - made[-1]).mT, made[-1])


def is_plain(x: Tensor) -> bool:
    """Whether a parameter is a plain floating-point tensor whose numbers are there."""
    is_known = type(x) in (Tensor, nn.Parameter)
    return is_known and x.dtype in FLOATS and not x.is_meta


@contextlib.contextmanager
def probing(module: nn.Module) -> Iterator[None]:
    """A context in which hooks of recordings are silent, and dropout within the module is off."""
    dropouts = (part for part in module.modules() if isinstance(part, nn.Dropout))
    _thread.probing = True
    try:
        with having(dropouts, "training", False):
            yield
    finally:
        _thread.probing = False
