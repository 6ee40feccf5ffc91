"""lines.jsonl, which says what is finished: written by any number of processes at once.

An entry is a line of JSON, appended under a lock and not before the files that it names are whole.
An entry that a killed process left unfinished is no line of JSON, and counts for nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ikattn.cli.errors import doing
from ikattn.cli.shards import Shard

_BLOCK = 1 << 20  # bytes that are read at once


class Ledger:
    """The finished lines of a job. It takes a byte of memory for each line of the text.

    Attributes:
        path: Of lines.jsonl.
        total: How many lines there are to do.
        count: How many of them are known to be done.
        is_last: Whether an entry of ours made them all done.
    """

    def __init__(self, path: Path, file: BinaryIO, total: int) -> None:
        self.path, self.total, self.count = path, total, 0
        self.is_last = False
        self._file = file
        self._done = bytearray(total)
        self._read = 0  # bytes of the file that are known
        self.follow()

    def has(self, lines: range) -> bool:
        """Whether all of these lines are done; the first line is 1."""
        return self._done.find(0, lines.start - 1, lines.stop - 1) < 0

    def missing(self, shard: Shard, size: int) -> int:
        """How many lines of a shard are not done, where parts have size lines."""
        if self.count == self.total:
            return 0
        begins = range((shard.number - 1) * size, self.total, shard.count * size)
        return sum(self._done.count(0, begin, begin + size) for begin in begins)

    def follow(self) -> None:
        """Reads the entries that others have added."""
        for text in self._new_lines():
            entry = read_entry(text)
            if entry is not None:
                self._mark(lines_of(entry))

    def add(self, entries: Sequence[dict[str, Any]]) -> None:
        """Marks the entries' lines as finished, even if the power fails then.

        An entry whose lines another process has finished meanwhile is not added again.
        """
        with self._alone():
            self.follow()
            new = [entry for entry in entries if not self.has(lines_of(entry))]
            if not new:
                return
            text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in new).encode()
            if self._ends_within_an_entry():
                text = b"\n" + text
            with doing(f"cannot write {self.path}"):
                while text:  # past the buffer, which would write again what a full disk refused
                    text = text[os.write(self._file.fileno(), text) :]
            self.follow()
            self.is_last = self.count == self.total
        os.fsync(self._file.fileno())

    def _mark(self, lines: range) -> None:
        begin, end = max(lines.start - 1, 0), min(lines.stop - 1, self.total)
        self.count += self._done.count(0, begin, end)
        self._done[begin:end] = b"\1" * max(0, end - begin)

    def _new_lines(self) -> Iterator[bytes]:
        """Lines that were added since the last call and are whole."""
        rest = b""
        while block := os.pread(self._file.fileno(), _BLOCK, self._read + len(rest)):
            *whole, rest = (rest + block).split(b"\n")
            for text in whole:
                self._read += len(text) + 1
                yield text

    def _ends_within_an_entry(self) -> bool:
        size = os.fstat(self._file.fileno()).st_size
        return size > 0 and os.pread(self._file.fileno(), 1, size - 1) != b"\n"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def read_entry(text: bytes) -> dict[str, Any] | None:
    """The entry of a line of lines.jsonl; None for one that a killed run left unfinished."""
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    is_whole = (
        isinstance(entry, dict)
        and isinstance(entry.get("line"), int)
        and isinstance(entry.get("files"), list)
        and ("text" in entry or isinstance(entry.get("through"), int))
    )
    return entry if is_whole else None


def lines_of(entry: dict[str, Any]) -> range:
    """The lines that an entry is about: one, or those of a part."""
    return range(entry["line"], entry.get("through", entry["line"]) + 1)
