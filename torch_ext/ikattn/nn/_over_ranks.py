"""Which function attends while a module runs: the operator, or one that goes over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ikattn.ops.attention import implicit_kernel_attention

__all__ = ["attending_by", "attention_function", "is_over_ranks"]

_attend: ContextVar[Callable[..., Tensor]] = ContextVar(
    "ikattn_attend", default=implicit_kernel_attention
)


def attention_function() -> Callable[..., Tensor]:
    """What is to be called with the arguments of ``implicit_kernel_attention``."""
    return _attend.get()


def is_over_ranks() -> bool:
    """Whether keys of other ranks are seen, too, so that no rank has all weights of a query."""
    return _attend.get() is not implicit_kernel_attention


def attending_by(
    module: nn.Module, attend: Callable[..., Tensor], options: dict[str, Any]
) -> list[RemovableHandle]:
    """Makes a module attend by another function, until the handles are removed."""
    tokens: list[Any] = []

    def before(*_: Any) -> None:
        tokens.append(_attend.set(partial(attend, **options)))

    def after(*_: Any) -> None:
        _attend.reset(tokens.pop())

    return [
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    ]
