"""The job of ``python -m ikattn analyze``, and the lines that it reads."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ikattn.cli.errors import AnalyzeError, sentence
from ikattn.maps.sequences import AXES
from ikattn.recorder.plan.run_maps import ALL_MAPS, LEDGER, USUAL_MAPS

LINE_FORMATS = ("html", "npz", "safetensors", "json", "png")  # a file for each line
FORMATS = (*LINE_FORMATS, "sums")
GROUPS = {
    "all": ALL_MAPS,
    "usual": ("weights", *USUAL_MAPS),
    "ledger": (*LEDGER, "value_norms", "per_head"),
}
TABLE = ".jsonl"  # the ending of a table


@dataclass(frozen=True)
class Job:
    """A job of the command line, whose options are its fields.

    maps and formats are names out of FORMATS and of maps and GROUPS of them, layers patterns of
    names, or numbers as text; None: all.
    """

    model: str
    maps: tuple[str, ...]
    formats: tuple[str, ...]
    out: Path
    layers: tuple[str, ...] | None = None
    batch_size: int = 8
    max_length: int | None = None
    device: str = "cpu"
    restart: bool = False

    @property
    def line_formats(self) -> tuple[str, ...]:
        """Formats with a file for each line."""
        return tuple(kind for kind in self.formats if kind in LINE_FORMATS)


@dataclass(frozen=True)
class Line:
    """One line: its number from 1, its text, and what a decoder reads with it."""

    number: int
    text: str
    target: str | None

    @property
    def empty(self) -> bool:
        return not self.text.strip() or (self.target is not None and not self.target.strip())


def single_maps(maps: Sequence[str]) -> tuple[str, ...]:
    """The maps that names of maps and groups stand for, each once."""
    return tuple(dict.fromkeys(one for name in maps for one in GROUPS.get(name, (name,))))


def drawable_maps(maps: Sequence[str]) -> list[str]:
    """Returns maps that have queries and keys, which a page or picture can show."""
    return [name for name in single_maps(maps) if AXES.get(name, "").endswith("LS")]


def lines_between_saves(count: int) -> int:
    """How many of count lines a killed run may have to add to its sums again."""
    return max(16, math.ceil(count / 1000))


@dataclass(frozen=True)
class Source:
    """Lines of text, counted and hashed, but not kept where they come from a file."""

    texts: Sequence[str] | Path  # lines; or a file of UTF-8 text, or a table of JSON lines
    column: str  # of a table
    count: int = 0  # of lines
    digest: str = ""  # of the lines

    @staticmethod
    def of(option: str, texts: Sequence[str] | Path, column: str = "text") -> Source:
        """Reads all lines once, or raises AnalyzeError; ``option`` names what was given."""
        digest, count = hashlib.sha256(), 0
        place = texts if isinstance(texts, Path) else option
        if isinstance(texts, Path) and texts.exists() and not texts.is_file():
            raise AnalyzeError(f"{texts} must be a regular file, which can be read twice")
        try:
            for text in Source(texts, column):
                digest.update(text.encode() + b"\n")
                count += 1
        except ValueError as error:
            rules = {UnicodeDecodeError: "must be UTF-8; ", UnicodeEncodeError: "must be text; "}
            said = f"{rules.get(type(error), '')}{error}"
            raise AnalyzeError(f"{place}, line {count + 1}: {said}") from error
        except OSError as error:
            cause = error.strerror or sentence(error)
            raise AnalyzeError(f"cannot read {place}: {cause}") from error
        if count == 0:
            raise AnalyzeError(f"{place} holds no line")
        return Source(texts, column, count, digest.hexdigest())

    def __iter__(self) -> Iterator[str]:
        if not isinstance(self.texts, Path):
            yield from self.texts
            return
        with self.texts.open("rb") as lines:  # decoded one by one, to know which cannot be
            for number, line in enumerate(lines):
                text = line.decode("utf-8" if number else "utf-8-sig").rstrip("\r\n")
                yield self._cell(text) if self.texts.suffix == TABLE else text

    def _cell(self, text: str) -> str:
        """The text in a row of a table; one that is null is empty."""
        try:
            found = json.loads(text)[self.column]
        except (ValueError, TypeError, KeyError):
            found = 0
        if found is not None and not isinstance(found, str):
            raise ValueError(
                f"must be a JSON object with text under {self.column!r}, got {text[:80]}"
            )
        return found or ""


def read_lines(source: Source, target: Source | None) -> Iterator[Line]:
    targets = iter(target) if target is not None else None
    for number, text in enumerate(source, start=1):
        yield Line(number, text, None if targets is None else next(targets))
