"""The function that attends while a module runs: the operator, or one over several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ikattn._heads import HeadShare
from ikattn.ops.attention import implicit_kernel_attention
from ikattn.ops.dropout import draw_dropout_seed, place_dropout_seed

_MARK = "_ikattn_over_ranks"  # on a module: True within a context, False after one

_attend: ContextVar[Callable[..., Tensor]] = ContextVar(
    "ikattn_attend", default=implicit_kernel_attention
)


def attention_function() -> Callable[..., Tensor]:
    """Returns the function to call with the arguments of ``implicit_kernel_attention``.

    A compiled call goes over no ranks, which ``AttendingBy`` finds out.
    """
    return implicit_kernel_attention if torch.compiler.is_compiling() else _attend.get()


def is_over_ranks() -> bool:
    """Whether keys of other ranks are seen, too, so that no rank has all weights of a query."""
    return attention_function() is not implicit_kernel_attention


def goes_over_ranks(module: nn.Module) -> bool:
    """Whether a module is in a context, so that its calls see keys of other ranks."""
    return bool(getattr(module, _MARK, False))


def dropout_seed_for(
    dropout_p: float, device: torch.device, share: HeadShare | None
) -> Tensor | None:
    """Returns the seed of a module's call; None if it drops nothing or ranks draw one for all.

    ``share`` is the rank's heads, whose mask is a part of that of all heads; None: it has all.
    """
    if dropout_p == 0.0:
        return None
    if is_over_ranks():
        if share is not None:
            raise NotImplementedError(
                "attention with dropout does not work where ranks share out both heads and tokens"
            )
        return None
    seed = draw_dropout_seed(device)
    if share is None:
        return seed
    return place_dropout_seed(seed, heads=share.num_heads, head=share.first)


class AttendingBy:
    """Makes a module with an implicit kernel attend by another function, until ``remove``.

    A call of the module that ends before it attended, by an error or in another way, is told to the
    other ranks, which would wait for it: ``refuse`` is called with a device and the reason.
    """

    def __init__(
        self,
        module: nn.Module,
        attend: Callable[..., Tensor],
        refuse: Callable[[torch.device, str], None],
    ) -> None:
        if goes_over_ranks(module):
            raise RuntimeError(
                f"context_parallel: this {type(module).__name__} is in another context already"
            )
        self._module, self._over_ranks, self._refuse = module, attend, refuse
        self._open: list[tuple[Callable[..., Tensor], list[bool]]] = []
        setattr(module, _MARK, True)
        vars(module).pop("_ikattn_local_again", None)
        self._handles = [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Undoes it, also where a call was broken off."""
        for handle in self._handles:
            handle.remove()
        while self._open:
            _attend.set(self._open.pop()[0])
        setattr(self._module, _MARK, False)
        self._module.register_forward_pre_hook(_refuse_recomputation)

    def _before(self, *_: Any) -> None:
        called = [False]

        def attend(*tensors: Tensor | None, **options: Any) -> Tensor:
            called[0] = True
            return self._over_ranks(*tensors, **options)

        self._open.append((_attend.get(), called))
        _attend.set(attend)

    def _after(self, module: nn.Module, args: Any, _: Any) -> None:
        before, called = self._open.pop()
        _attend.set(before)
        if called[0]:
            return
        error = sys.exc_info()[1]
        why = f"{type(module).__name__} did not attend over the ranks"
        if error is not None:
            why = f"{type(error).__name__}: {error}"
        device = next((x.device for x in module.parameters()), torch.device("cpu"))
        self._refuse(device, why)
        if error is None:
            raise RuntimeError(
                f"context_parallel: {why}: its forward ended without the attention of its implicit "
                "kernel, and its output is of this rank's tokens alone"
            )


def _refuse_recomputation(module: nn.Module, args: Any) -> None:
    """Refuses a checkpoint that is computed again after its context, over its own tokens alone."""
    if getattr(module, _MARK, None) is not False or "_ikattn_local_again" in vars(module):
        return
    if torch._C._current_graph_task_id() == -1:  # a call of its own, not one within a backward pass
        vars(module)["_ikattn_local_again"] = True
        return
    raise RuntimeError(
        f"context_parallel: the forward of {type(module).__name__} is computed again in a backward "
        "pass after the context, where it would attend to this rank's tokens alone: call backward "
        "within the context"
    )
