"""Calls a spectral source and checks what it returns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ikattn.spectral.generator import Generator

Drawn = tuple[Tensor, "Tensor | None", "Tensor | None"]


def unwrapped(source: Any) -> Any:
    """Returns the source that is called where PEFT or torch.compile has put a module around it."""
    parts = getattr(source, "_modules", {})
    if "_orig_mod" in parts:
        return unwrapped(source._orig_mod)
    if "original_module" in parts and "modules_to_save" in parts:  # PEFT's ModulesToSaveWrapper
        active = [] if source.disable_adapters else source.active_adapters[:1]
        saved = [source.modules_to_save[x] for x in active if x in source.modules_to_save]
        return saved[0] if saved else source.original_module
    return source


def call_source(
    source: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None = None,
    *,
    parameters: dict[str, Tensor] | None = None,
) -> Drawn:
    """Calls a spectral source as ``ikattn.spectral`` describes it.

    Parameters by name stand in for those of the source, which must be a module then.
    """
    heads, size = query.size(1), query.size(3)
    if isinstance(source, Generator) and (source.num_heads, source.head_dim) != (heads, size):
        raise ValueError(
            f"{_name(source)} is for H, d = {source.num_heads}, {source.head_dim}, got queries of "
            f"H, d = {heads}, {size}"
        )
    arguments = [query, key, key_padding_mask]
    if getattr(source, "pools", False):
        arguments.append(query_padding_mask)
    if parameters is None:
        returned = source(*arguments)
    else:
        assert isinstance(source, nn.Module)
        returned = torch.func.functional_call(source, parameters, tuple(arguments))
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise TypeError(
            f"{_name(source)} must return (w1, w2) or (w1, w2, regularization), got "
            f"{_describe(returned)}"
        )
    w1, w2 = returned[:2]
    regularization = returned[2] if len(returned) == 3 else None
    _check_shapes(source, w1, w2, query)
    if regularization is not None and (
        not isinstance(regularization, Tensor)
        or regularization.dim() != 0
        or not regularization.is_floating_point()
    ):
        raise TypeError(
            f"{_name(source)} must return a scalar, real tensor or None as "
            f"regularization, got {_describe(regularization)}"
        )
    for name, w in (("w1", w1), ("w2", w2)):
        if w is not None and _can_be_read(w):
            _check_finite(source, name, w.detach())
    if regularization is not None and _can_be_read(regularization):
        value = regularization.item()
        if not math.isfinite(value):
            raise ValueError(f"{_name(source)}: regularization must be finite, got {value}")
    return w1, w2, regularization


def _check_shapes(source: object, w1: object, w2: object, query: Tensor) -> None:
    if not isinstance(w1, Tensor) or not (w2 is None or isinstance(w2, Tensor)):
        raise TypeError(
            f"{_name(source)} must return tensors w1 and w2, w2 or None, got {_describe(w1)} and "
            f"{_describe(w2)}"
        )
    for name, w in (("w1", w1), ("w2", w2)):
        if w is not None and not w.is_floating_point():
            raise TypeError(f"{_name(source)}: {name} must be floating point, got {w.dtype}")
    batch, heads, _, size = query.shape
    fits = w1.dim() in (3, 4) and w1.shape[-3:-1] == (heads, size) and w1.size(-1) > 0
    if not fits or (w1.dim() == 4 and w1.size(0) != batch):
        raise ValueError(
            f"{_name(source)}: w1 must have shape [H, d, M] or [B, H, d, M] with B, H, d = "
            f"{batch}, {heads}, {size}, got {list(w1.shape)}"
        )
    if w2 is not None and w2.shape != w1.shape:
        raise ValueError(
            f"{_name(source)}: w2 must be shaped as w1, {list(w1.shape)}, got {list(w2.shape)}"
        )


def _can_be_read(w: Tensor) -> bool:
    """Whether its numbers are at hand: on another device one would have to wait for them.

    A tracer, such as make_fx, refuses to show them.
    """
    return (
        w.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and _get_current_dispatch_mode() is None
        and _len_torch_dispatch_stack_pre_dispatch() == 0
        and type(w) in (Tensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(w)
    )


def _check_finite(source: object, name: str, w: Tensor) -> None:
    if math.isfinite(w.sum().item()):  # quick; a sum may overflow, though
        return
    bad = ~w.isfinite()
    if not bad.any():
        return
    heads, where = bad.any(-1).any(-1), ""
    if heads.dim() == 2:
        where = f" of samples {heads.any(1).nonzero().flatten().tolist()}"
        heads = heads.any(0)
    raise ValueError(
        f"{_name(source)}: {name} must be finite, got {int(bad.sum())} of {bad.numel()} that are "
        f"NaN or infinite, in heads {heads.nonzero().flatten().tolist()}{where}"
    )


def _describe(returned: object) -> str:
    if isinstance(returned, tuple):
        return f"a tuple of {len(returned)}"
    if isinstance(returned, Tensor):
        return f"a tensor {list(returned.shape)} of {returned.dtype}"
    return type(returned).__name__


def _name(source: object) -> str:
    """Names the class of a source and, in a model that is running, its layer."""
    kind = type(source).__name__
    if not isinstance(source, nn.Module):
        return kind
    names: list[str] = []
    inner: nn.Module = source
    frame = inspect.currentframe()
    while frame is not None:  # outwards; the last module found is the whole model
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module) and caller is not inner:
            found = (name for name, module in caller.named_modules() if module is inner)
            name = next(found, None)
            if name is not None:
                names.insert(0, name)
                inner = caller
        frame = frame.f_back
    path = ".".join(names)
    return f"{kind} {path!r}" if path else kind
