"""The job of ``python -m ikattn analyze``, and the lines that it reads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ikattn.cli.errors import AnalyzeError, sentence
from ikattn.cli.shards import Shard
from ikattn.cli.tables import Table
from ikattn.maps.sequences import AXES
from ikattn.recorder.plan.run_maps import ALL_MAPS, LEDGER, USUAL_MAPS

LINE_FORMATS = ("html", "npz", "safetensors", "json", "png")  # a file for each line
FORMATS = (*LINE_FORMATS, "parquet", "arrow", "sums")  # and one for each part of the lines
GROUPS = {
    "all": ALL_MAPS,
    "usual": ("weights", *USUAL_MAPS),
    "ledger": (*LEDGER, "value_norms", "per_head"),
}


@dataclass(frozen=True)
class Job:
    """A job of the command line.

    Attributes:
        model: A directory or a name on the Hugging Face hub.
        texts: Lines; or None, and they are in file.
        file: A UTF-8 text, one sequence a line; or a column of a table.
        target_texts, target_file: What the decoder of a sequence-to-sequence model reads, line by
            line.
        maps: Names of maps and of GROUPS of them; each layer gives those of them that it has.
        layers: Patterns of names of layers, or numbers as text; None: all.
        formats: Out of FORMATS.
        out: The directory that receives everything.
        batch_size: Lines in one forward call.
        max_length: In tokens; None: as long as the model allows.
        device: As torch names it.
        restart: Forget what an earlier run has finished.
        shard: Which of the lines this process does.
        part_lines: In a file of many lines; None: as many as make a thousand files, and at least
            16.
    """

    model: str
    texts: tuple[str, ...] | None
    file: Path | Table | None
    target_texts: tuple[str, ...] | None
    target_file: Path | Table | None
    maps: tuple[str, ...]
    formats: tuple[str, ...]
    out: Path
    layers: tuple[str, ...] | None = None
    batch_size: int = 8
    max_length: int | None = None
    device: str = "cpu"
    restart: bool = False
    shard: Shard = field(default_factory=Shard)
    part_lines: int | None = None

    @property
    def line_formats(self) -> tuple[str, ...]:
        """Formats with a file for each line."""
        return tuple(kind for kind in self.formats if kind in LINE_FORMATS)

    @property
    def part_formats(self) -> tuple[str, ...]:
        """Formats with a file for each part of the lines."""
        return tuple(kind for kind in self.formats if kind not in LINE_FORMATS)

    def lines_in_a_part(self, count: int) -> int:
        """How many of count lines are finished together; they are one process's."""
        if not self.part_formats:
            return 1
        return self.part_lines or max(16, math.ceil(count / 1000))


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


@dataclass(frozen=True)
class Source:
    """Lines of text, counted and hashed, but not kept where they come from a file."""

    texts: tuple[str, ...] | None
    file: Path | Table | None
    count: int
    digest: str

    @staticmethod
    def of(option: str, texts: tuple[str, ...] | None, file: Path | Table | None) -> Source:
        digest, count = hashlib.sha256(), 0
        if isinstance(file, Path) and file.exists() and not file.is_file():
            raise AnalyzeError(f"{file} must be a regular file, which can be read twice")
        try:
            for text in Source(texts, file, 0, ""):
                digest.update(text.encode() + b"\n")
                count += 1
        except UnicodeDecodeError as error:
            raise AnalyzeError(f"{file}, line {count + 1}: must be UTF-8; {error}") from error
        except UnicodeEncodeError as error:
            raise AnalyzeError(f"{option}, line {count + 1}: must be text; {error}") from error
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or sentence(error)
            raise AnalyzeError(f"cannot read {file}: {cause}") from error
        if count == 0:
            raise AnalyzeError(f"{file or option} holds no line")
        return Source(texts, file, count, digest.hexdigest())

    def __iter__(self) -> Iterator[str]:
        if self.texts is not None:
            yield from self.texts
        elif isinstance(self.file, Table):
            yield from self.file.texts()
        elif self.file is not None:
            with self.file.open("rb") as lines:  # decoded one by one, to know which cannot be
                for number, line in enumerate(lines):
                    text = line.decode("utf-8" if number else "utf-8-sig")
                    yield text.rstrip("\r\n")


def read_lines(source: Source, target: Source | None) -> Iterator[Line]:
    targets = iter(target) if target is not None else None
    for number, text in enumerate(source, start=1):
        yield Line(number, text, None if targets is None else next(targets))
