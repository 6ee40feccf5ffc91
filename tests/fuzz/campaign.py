"""Many calls: which are drawn, what is counted, and the smallest of one that fails."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fuzz.attention import AttentionCall
from fuzz.draws import Draws
from fuzz.edges import EdgeCall
from fuzz.holding import Wrong
from fuzz.maps import MapCall
from fuzz.modules import ModuleCall, RecordCall
from fuzz.state import StateCall


class Call(Protocol):
    """A call of one kind: a frozen dataclass."""

    seed: int

    def check(self) -> None: ...
    def cell(self) -> str: ...


# Each kind with its share of the calls.
KINDS: dict[Any, int] = {
    AttentionCall: 45,
    StateCall: 15,
    EdgeCall: 10,
    MapCall: 20,
    ModuleCall: 6,
    RecordCall: 3,
}


def drawn(seed: int, kind: str | None = None) -> Call:
    """Returns the call of a number."""
    r = Draws(seed)
    kinds = {x: n for x, n in KINDS.items() if kind in (None, x.__name__)}
    made: Call = r.weighted(kinds).draw(r.bits())
    return made


def replayed(line: str) -> Call:
    """Returns the call that a line of Python makes."""
    names = {kind.__name__: kind for kind in KINDS}
    made: Call = eval(line, {"__builtins__": {}, "nan": float("nan"), "inf": float("inf")}, names)
    return made


def failure_of(call: Call) -> str | None:
    """Tells what does not hold of a call."""
    try:
        call.check()
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.set_float32_matmul_precision("highest")
    return None


@dataclass
class Found:
    """Results of some calls."""

    calls: int = 0
    failures: list[tuple[Call, str]] = field(default_factory=list)
    cells: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def seeds_from(seed: int) -> Iterator[int]:
    r = Draws(seed)
    while True:
        yield r.bits()


def run(seed: int, calls: int, kind: str | None = None, stop_at: int = 1_000_000) -> Found:
    """Checks so many calls of a stream, or until ``stop_at`` have failed."""
    found, began = Found(), time.perf_counter()
    for own in seeds_from(seed):
        if found.calls >= calls or len(found.failures) >= stop_at:
            break
        call = drawn(own, kind)
        found.calls += 1
        told = failure_of(call)
        if told is not None:
            found.failures.append((call, told))
        found.cells[f"{type(call).__name__}: {call.cell()}"] += 1
    found.seconds = time.perf_counter() - began
    return found


def smallest(call: Call, limit: int = 400) -> Call:
    """Makes fields of a failing call smaller as long as it fails with the same kind of message."""

    def kind_of(told: str | None) -> str:
        return (told or "").split("[")[0].split(":")[0]

    told = kind_of(failure_of(call))
    tried = 0
    again = True
    while again and tried < limit:
        again = False
        for candidate in _simpler(call):
            tried += 1
            if told and kind_of(failure_of(candidate)) == told:
                call, again = candidate, True
                break
    return call


def _simpler(call: Call) -> Iterator[Call]:
    default = {x.name: x.default for x in dataclasses.fields(call)}  # type: ignore[arg-type]
    for name, value in vars(call).items():
        if name == "seed":
            continue
        options: list[Any] = []
        if isinstance(value, bool) or value is None or isinstance(value, str):
            options = [default[name]]
        elif isinstance(value, tuple):
            options = [default[name], *(value[:i] + value[i + 1 :] for i in range(len(value)))]
            if name == "layouts":
                options = [default[name]]
        elif isinstance(value, int):
            least = default[name] if isinstance(default[name], int) else 1
            options = [
                x for x in (least, value // 2, value - value // 4, value - 1) if least <= x < value
            ]
        elif isinstance(value, float):
            options = [default[name]]
        for option in options:
            if option != value:
                yield dataclasses.replace(call, **{name: option})  # type: ignore[type-var]
