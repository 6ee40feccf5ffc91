"""Wrong calls of the operators, in a process of their own: each raises, and names the argument.

A call of another kind runs first. The operators that it has called are called again, with one
argument made wrong.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import signal
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fuzz.attention import AttentionCall
from fuzz.draws import Draws
from fuzz.edges import EdgeCall
from fuzz.holding import Wrong
from fuzz.maps import MapCall
from fuzz.state import StateCall

Named = dict[str, Any]
BASES: dict[str, Any] = {x.__name__: x for x in (AttentionCall, EdgeCall, MapCall, StateCall)}
NO_TENSORS = ("deterministic", "set_deterministic", "which_kernels")
# Wrong values that are not tensors, and whether each must raise.
OTHERS: dict[str, tuple[tuple[Any, bool], ...]] = {
    "float": ((math.nan, False), (-math.inf, False), (-1.0, False), ("one", True)),
    "int": ((-1, False), (-(2**62), False), (2**62, False), (1.5, True), ("one", True)),
    "bool": (("yes", True), ([], True)),
    "str": (("nothing", True), (1, True)),
}
CHECKED = ("p", "eps", "dropout_p")  # arguments for which each of these must


class Operators(TorchFunctionMode):
    """Keeps the first call of each operator of ikattn."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, Named]] = {}

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(f)
        short = name.removeprefix("ikattn.")
        is_new = name != short and short not in NO_TENSORS and short not in self.calls
        if is_new and hasattr(f, "default"):  # no overload, which a compiled graph calls
            names = [x.name for x in f.default._schema.arguments]
            self.calls[short] = (f.default, dict(zip(names, args, strict=False)) | (kwargs or {}))
        return f(*args, **(kwargs or {}))

    def opcheck(self, number: int) -> None:
        """Holds one of them to torch's checks of schema, fake results and autograd."""
        overload, given = list(self.calls.values())[number % len(self.calls)]
        # NaN equals nothing in these checks.
        if not any(bool(x.isnan().any()) for x in given.values() if isinstance(x, Tensor)):
            torch.library.opcheck(overload, (), given)


@dataclass(frozen=True)
class WrongCall:
    """Calls like those of ``base``, each wrong in the way that a number says."""

    seed: int
    base: str = "AttentionCall"
    ways: tuple[int, ...] = ()

    @staticmethod
    def draw(seed: int) -> WrongCall:
        r = Draws(seed)
        return WrongCall(seed, r.choice(list(BASES)), tuple(r.below(2**32) for _ in range(20)))

    def cell(self) -> dict[str, Any]:
        return {"base": self.base}

    def check(self) -> None:
        with Operators() as seen:
            BASES[self.base].draw(self.seed).check()
        calls = sorted(seen.calls.items())
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "w", buffering=1) as told, contextlib.suppress(BaseException):
                _try_all(calls, self.ways, told)
                os._exit(0)
            os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as told:
            lines = told.read().splitlines() or [""]
        status = os.waitpid(child, 0)[1]
        if status:
            end = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an exit"
            raise Wrong(f"a wrong call ends the process by {end}: {lines[-1]}")
        for line in lines:
            if line.startswith("WRONG "):
                raise Wrong(line[6:])


def _try_all(calls: list[tuple[str, tuple[Any, Named]]], ways: tuple[int, ...], told: Any) -> None:
    signal.alarm(60)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "ASAN_OPTIONS" not in os.environ:  # whose shadow memory takes more
        resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
    for way in ways:
        r = Draws(way)
        operator, (overload, given) = r.choice(calls)
        argument = r.choice([x for x in overload._schema.arguments if x.name in given])
        changed, how, must_raise = _made_wrong(r, operator, argument, given[argument.name])
        if how.endswith("meta") and sum(isinstance(x, Tensor) for x in given.values()) == 1:
            continue  # a call on another device
        what = f"a wrong call of {operator}, where {argument.name} {how}"
        print(what, file=told)
        try:
            overload(**given | {argument.name: changed})
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            # Another size may be wrong only beside another argument, which is then named.
            names = [argument.name, "every tensor"]
            names += [] if must_raise else ["memory", "sizes", *given]
            message = str(error).split("\n")[0]
            if not any(re.search(rf"\b{x.replace('_', '[ _]')}\b", message) for x in names):
                print(f"WRONG {what}, does not name it: {message[:200]}", file=told)
        else:
            if must_raise:
                print(f"WRONG {what}, raises nothing", file=told)


def _made_wrong(r: Draws, operator: str, argument: Any, x: Any) -> tuple[Any, str, bool]:
    """Returns another value of an argument, words for it, and whether it must raise."""
    if not isinstance(x, Tensor):
        kind = str(argument.type)
        options = OTHERS.get(kind.removeprefix("Optional[").removesuffix("]"), (("one", True),))
        value, must_raise = r.choice(options)
        return value, f"is {value!r}", must_raise or argument.name in CHECKED
    x = x.detach()
    axis = r.below(x.dim()) if x.dim() else 0
    one = x.new_ones(()) if not x.numel() else x.reshape(-1)[0]
    longer = [n + (i == axis) for i, n in enumerate(x.shape)]
    others = math.prod(max(1, n) for n in x.shape)
    huge = [2**58 // others if i == axis else n for i, n in enumerate(x.shape)]
    other = torch.float32 if x.dtype == torch.int64 else torch.int32
    is_summed = argument.name == "value" and "edge" in operator  # which takes a huge one long
    is_index = x.dtype == torch.int64 and x.dim() == 1 and x.numel() > 2
    return r.choice([
        (x[(None,) * (7 - x.dim())], "has 7 axes", True),
        (one, "has no axes", False),
        (x.to(other), f"is of {other}", True),
        (x.to(torch.complex64), "is complex", True),
        (x.to("meta"), "is on the device meta", True),
        (one.expand(longer), f"is longer in axis {axis}", False),
        (one.expand(longer if is_summed else huge), f"is huge in axis {axis}", False),
        (x.narrow(axis, 0, 0) if x.dim() else x, f"is empty in axis {axis}", False),
        (x.to_sparse() if x.dim() else x, "is sparse", bool(x.dim())),
        (x + 2**40, "is out of range", is_index),
        ("one", "is a string", True),
    ])  # fmt: skip
