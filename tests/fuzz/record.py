"""Calls that have run, a compressed line of JSON each, and how often two properties met in one."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]  # "seed", "kind", "cell" and, of a call that failed, "failed" and "call"
WANTED = 100  # calls of each pair of properties

# Pairs that cannot be, by words of both, with the reason.
OF_16_BITS = ("instructions avx512_", "instructions amx")
UNREACHABLE = (
    (OF_16_BITS, ("linear",), "products of 16 bits are over pairs"),
    (OF_16_BITS, ("dtype float64",), "products of 16 bits are no substitute for those of 64"),
    (OF_16_BITS, ("dtype float16",), "products of 16 bits are of bfloat16"),
    (("ward linear",), ("mask rows",), "linear time takes no mask that differs between queries"),
    (("backward none",), ("gradients",), "a gradient has a backward"),
    (("backward",), ("gradients none",), "a backward has a gradient"),
    (("sums",), ("form features", "form moments"), "only a recurrent state has a type of sums"),
    (("way", "model"), ("norms", "maps", "padding"), "ways are those of models of transformers"),
    (("form softmax",), ("gradients w1", "gradients w2"), "softmax has no frequencies"),
    (("dtype float32",), ("kernel implicit", "kernel rbf"), "the module's formula is in float64"),
    (("mask bool", "mask none", "mask rows"), ("gradients attn_mask",), "it must be a float mask"),
)


def read(path: Path) -> Iterator[Line]:
    """Reads the whole lines of a record, which may end in what a kill has left of one."""
    with contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile), gzip.open(path, "rt") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


class Record:
    """A file that calls are added to."""

    def __init__(self, path: Path) -> None:
        self.done = list(read(path)) if path.exists() else []
        whole = path.with_name(path.name + ".whole")
        with gzip.open(whole, "wt") as file:
            file.writelines(map(_printed, self.done))
        whole.replace(path)
        self._file = gzip.open(path, "at")  # noqa: SIM115  until close
        self._waiting = 0

    def add(self, line: Line) -> None:
        self._file.write(_printed(line))
        self._waiting += 1
        if self._waiting % 100 == 0:
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _printed(line: Line) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


class Cells:
    """Counts of calls, by kind and by pairs of their properties."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.kinds: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str, str]] = Counter()
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> None:
        self.kinds[line["kind"]] += 1
        properties = [_named(*x) for x in line["cell"].items()]
        for first, second in itertools.combinations(properties, 2):
            for pair in itertools.product(first, second):
                self.pairs[(line["kind"], *pair)] += 1

    def missing(self) -> Iterator[tuple[str, str, str]]:
        """Returns the pairs of properties that have been seen, but not together."""
        seen: dict[str, dict[str, set[str]]] = {}
        for kind, *pair in self.pairs:
            for name in pair:
                seen.setdefault(kind, {}).setdefault(name.split()[0], set()).add(name)
        for kind, dimensions in seen.items():
            for one, other in itertools.combinations(dimensions.values(), 2):
                for pair in itertools.product(sorted(one), sorted(other)):
                    if not self.pairs[(kind, *pair)] and not self.pairs[(kind, *pair[::-1])]:
                        yield (kind, *pair)

    def table(self) -> Iterator[str]:
        """Returns lines: pairs with their counts, the rarest last, and those that never met."""
        yield from (f"{count:8d}  {kind}" for kind, count in self.kinds.most_common())
        for (kind, one, other), count in self.pairs.most_common():
            yield f"{count:8d}  {kind}: {one}, {other}"
        for kind, one, other in self.missing():
            yield f"   never  {kind}: {one}, {other}: {why_unreachable(one, other)}"
        rare = sum(count < WANTED for count in self.pairs.values())
        yield f"{len(self.pairs)} pairs of properties, {rare} of them in under {WANTED} calls"


def _named(dimension: str, values: str | list[str]) -> list[str]:
    return [f"{dimension} {x}" for x in ([values] if isinstance(values, str) else values)]


def why_unreachable(one: str, other: str) -> str:
    """Tells why no call has two properties."""
    for pair in ((one, other), (other, one)):
        for *words, reason in UNREACHABLE:
            if all(any(x in name for x in of) for of, name in zip(words, pair, strict=True)):
                return reason
    return "not yet drawn"
