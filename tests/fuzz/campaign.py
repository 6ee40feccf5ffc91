"""Many calls: which are drawn, what is counted, and the smallest of one that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from devices import DEVICE
from fuzz.attention import AttentionCall
from fuzz.draws import Draws
from fuzz.edges import EdgeCall
from fuzz.holding import Wrong
from fuzz.large import LargeCall
from fuzz.maps import MapCall
from fuzz.modules import ModuleCall, RecordCall
from fuzz.record import Cells, Line, Record
from fuzz.state import StateCall
from fuzz.wrong import Operators, WrongCall


class Call(Protocol):
    """A frozen dataclass. Its check raises Wrong where something does not hold."""

    seed: int

    def check(self) -> None: ...
    def cell(self) -> dict[str, Any]: ...


# Each kind with its share of a thousand calls.
KINDS: dict[Any, int] = {
    AttentionCall: 450,
    StateCall: 150,
    EdgeCall: 100,
    MapCall: 200,
    ModuleCall: 60,
    RecordCall: 29,
    WrongCall: 10,
    LargeCall: 1,
}
if DEVICE != "cpu":  # what has kernels there
    KINDS = {x: KINDS[x] for x in (AttentionCall, EdgeCall, MapCall)}


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
        is_checked = call.seed % 2000 == 0 and DEVICE == "cpu"
        is_finite = getattr(call, "values", "exact") in ("exact", "normal")
        with Operators() if is_checked and is_finite else contextlib.nullcontext() as seen:
            call.check()
        if seen is not None and seen.calls:
            seen.opcheck(call.seed // 2000)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.set_float32_matmul_precision("highest")
    return None


@dataclass
class Found:
    calls: int = 0
    failures: list[tuple[Call, str]] = field(default_factory=list)
    cells: Cells = field(default_factory=Cells)
    seconds: float = 0.0

    def add(self, line: Line) -> None:
        self.calls += 1
        self.cells.add(line)
        if "failed" in line:
            self.failures.append((replayed(line["call"]), line["failed"]))


def seeds_from(seed: int) -> Iterator[int]:
    r = Draws(seed)
    while True:
        yield r.bits()


def run(
    seed: int,
    calls: int,
    kind: str | None = None,
    stop_at: int = 1_000_000,
    path: Path | None = None,
) -> Found:
    """Checks so many calls of a stream, or until ``stop_at`` have failed.

    Those that a record already has are not run again.
    """
    found, began, numbers = Found(), time.perf_counter(), seeds_from(seed)
    record = None if path is None else Record(path)
    for line in record.done if record else ():
        if line["seed"] != next(numbers):
            raise SystemExit(f"{path} has calls of another seed than {seed}")
        found.add(line)
    for own in numbers:
        if found.calls >= calls or len(found.failures) >= stop_at:
            break
        line = checked(own, kind)
        found.add(line)
        if record:
            record.add(line)
    if record:
        record.close()
    found.seconds = time.perf_counter() - began
    return found


def checked(seed: int, kind: str | None = None) -> Line:
    """Checks the call of a number; returns its line of a record."""
    call = drawn(seed, kind)
    told = failure_of(call)
    line = {"seed": seed, "kind": type(call).__name__, "cell": call.cell()}
    return line if told is None else line | {"failed": told, "call": repr(call)}


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
