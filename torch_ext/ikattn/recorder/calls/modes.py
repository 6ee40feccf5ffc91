"""The modes that a recording works in, whatever those of the model that runs are.

A recording computes beside the model, from within hooks. There it has no gradients, no autocast and
no torch.compile, so that the model's graph, its checkpoints and the types of its numbers are those
of a call outside the recording.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_DEVICES = ("cpu", "cuda", "mps", "xpu")


class _Modes(NamedTuple):
    """Modes of a model that runs."""

    has_gradients: bool
    autocast: tuple[tuple[str, torch.dtype], ...] = ()  # of each type of device where it is on


class _Thread(threading.local):
    modes: _Modes | None = None  # of the model, while a recording works in this thread


_thread = _Thread()


def in_own_modes(work: _F) -> _F:
    """Wraps what a hook calls, so that it runs in the modes of a recording."""

    @functools.wraps(work)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before = _thread.modes
        own = _Modes(torch.is_grad_enabled())
        if torch._C._is_any_autocast_enabled():
            own = own._replace(autocast=tuple(_autocast()))
            for device, _ in own.autocast:
                torch.set_autocast_enabled(device, False)
        _thread.modes = own
        torch._C._set_grad_enabled(False)
        try:
            return work(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(own.has_gradients)
            for device, _ in own.autocast:
                torch.set_autocast_enabled(device, True)
            _thread.modes = before

    wrapped._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapped  # type: ignore[return-value]


def _autocast() -> Iterator[tuple[str, torch.dtype]]:
    for device in _DEVICES:
        if torch.is_autocast_enabled(device):
            yield device, torch.get_autocast_dtype(device)


def model_has_gradients() -> bool:
    """Returns whether grad mode is on in the model that runs, or here where none does."""
    return torch.is_grad_enabled() if _thread.modes is None else _thread.modes.has_gradients


def model_has_autocast() -> bool:
    return _thread.modes is not None and bool(_thread.modes.autocast)


@contextlib.contextmanager
def as_the_model_runs(*, gradients: bool) -> Iterator[None]:
    """Turns on the autocast of the model that runs, and its gradients where they are asked for.

    Casts are not kept: the model would find those that were made without gradients.
    """
    modes = _thread.modes or _Modes(torch.is_grad_enabled(), tuple(_autocast()))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(gradients and modes.has_gradients))
        for device, dtype in modes.autocast:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        yield


def check_is_plain_call(name: str) -> None:
    """Raises NotImplementedError in torch.func and torch.compile, where hooks see no numbers."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            f"record: {name} runs inside a transform of torch.func (grad, vmap, jvp), where its "
            "tensors have no numbers to look at; record a call outside the transform"
        )
    if "torch._dynamo" not in sys.modules:
        return
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if get_eval_frame_callback() not in (None, False):
        raise NotImplementedError(
            f"record: {name} runs in code that torch.compile makes, and compiled for the first "
            "time inside the block; call torch.compile before the block, or call the model itself"
        )


_lock = threading.Lock()
_users = 0  # blocks in which compiled code is off
_stance: Any = None  # the stance of the compiler, while it is off


@contextlib.contextmanager
def without_compiled_code() -> Iterator[None]:
    """Has all that torch.compile made run as written, in every thread, for the time of the block.

    Compiled code has no hooks. Blocks of several threads may overlap.
    """
    global _users, _stance
    if "torch._dynamo" not in sys.modules:
        yield  # nothing has been compiled, and importing the compiler takes a second
        return
    with _lock:
        if _users == 0:
            _stance = torch.compiler.set_stance("force_eager")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _stance.__exit__(None, None, None)
                _stance = None
