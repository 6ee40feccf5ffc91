"""The directory of ``python -m ikattn analyze``: what is finished in it, and what is not.

A line's files are written whole, and only then does its entry go to lines.jsonl.

DIR/manifest.json      what was asked for; a run with other wishes is refused
DIR/lines.jsonl        an entry for each line with files of its own, when these are whole
DIR/sums-000032.npz    the sums of the first 32 lines, until sums.npz holds those of all
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from ikattn._library import version
from ikattn._whole_files import PARTIAL, whole_file
from ikattn.cli.errors import AnalyzeError, doing
from ikattn.cli.job import LINE_FORMATS, Job, Source
from ikattn.explain.corpora import CorpusSums
from ikattn.maps.recording import Recording

INDEX, SUMMARY = "index.html", "summary.html"
_MANIFEST, _LEDGER, _SUMS, _LOCK = "manifest.json", "lines.jsonl", "sums.npz", ".lock"
_NUMBERED = re.compile(rf"line-\d{{6,}}\.({'|'.join(LINE_FORMATS)})|sums-\d{{6,}}\.npz")


class Results:
    """The finished part of a job: lines with their files, and the sums of the first lines.

    It takes a byte of memory for each of the ``total`` lines of the text.
    """

    def __init__(self, job: Job, total: int, file: BinaryIO) -> None:
        self.ledger, self.total, self.sums = job.out / _LEDGER, total, CorpusSums()
        self._out, self._file = job.out, file
        self._has_files = bytearray(total) if job.line_formats else bytearray(b"\1" * total)
        for _, number in _entries(self.ledger, total):
            if number:
                self._has_files[number - 1] = 1
        self._summed = self._saved = total  # lines whose sums are in memory, and in a file
        if "sums" in job.formats:  # an earlier run may have saved those of some lines
            *fewer, last = sorted({0, *_lines_of_sums(self._out, total)})
            self._summed = self._saved = last
            if last:
                path = self._path_of_sums(last)
                with doing(f"remove {path}, and the same command does its lines again"):
                    self.sums = CorpusSums.load(path)
            for lines in fewer:
                self._path_of_sums(lines).unlink(missing_ok=True)

    @property
    def count(self) -> int:
        """How many lines stay finished, whatever happens now."""
        return self._has_files.count(1, 0, self._saved)

    @property
    def reached(self) -> int:
        """How many lines are finished, those included whose sums are not saved yet."""
        return self._has_files.count(1, 0, self._summed)

    def has(self, number: int) -> bool:
        """Whether nothing is left to do of a line; the first line is 1."""
        return self.has_files(number) and number <= self._summed

    def has_files(self, number: int) -> bool:
        """Whether a line has its own files, or needs none."""
        return self._has_files[number - 1] == 1

    def add_entry(self, entry: dict[str, Any]) -> None:
        """Marks a line, whose files are whole, as finished, even if the power fails then."""
        text = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        with doing(f"cannot write {self.ledger}"):
            while text:
                text = text[self._file.write(text) :]
            os.fsync(self._file.fileno())
        self._has_files[entry["line"] - 1] = 1

    def add_to_sums(self, number: int, recording: Recording) -> None:
        """Adds a line that follows those added before; of earlier ones nothing is added twice."""
        if number <= self._summed:
            return
        if recording.layers:
            with doing(f"line {number}"):
                self.sums.add(recording)
        self._summed = number

    def save_sums(self) -> None:
        """Writes the sums of the lines added, in the place of those of fewer lines."""
        if self.unsaved:
            self.sums.save(self._path_of_sums(self._summed))
            before, self._saved = self._saved, self._summed
            self._path_of_sums(before).unlink(missing_ok=True)

    @property
    def unsaved(self) -> int:
        """How many lines have their sums in memory alone."""
        return self._summed - self._saved

    def _path_of_sums(self, lines: int) -> Path:
        return self._out / (_SUMS if lines == self.total else f"sums-{lines:06d}.npz")


@contextmanager
def open_results(job: Job, source: Source, target: Source | None) -> Iterator[Results]:
    """The directory of results, in the state in which earlier runs left it.

    AnalyzeError tells of another run that is at work in it, or of the results of another job.
    """
    with doing(f"cannot write to {job.out}"):
        job.out.mkdir(parents=True, exist_ok=True)
        lock = (job.out / _LOCK).open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AnalyzeError(f"another run is writing to {job.out}") from None
        _refuse_what_others_wrote(job.out)
        if job.restart:  # no entry outlives its files, and no file the manifest that makes it ours
            (job.out / _LEDGER).unlink(missing_ok=True)
            for path in job.out.iterdir():
                if _is_of_results(path.name) and path.name not in (_MANIFEST, _LOCK):
                    path.unlink()
            (job.out / _MANIFEST).unlink(missing_ok=True)
        for partial in job.out.glob(PARTIAL):  # of a run that was killed
            partial.unlink()
        _compare_manifest(job, source, target)
        ledger = job.out / _LEDGER
        if not all(number for _, number in _entries(ledger, source.count)):
            with whole_file(ledger) as file:  # those cut off, twice there, or without their files
                entries = _entries(ledger, source.count)
                file.writelines(text for text, number in entries if number)
        with ledger.open("ab", buffering=0) as file:
            yield Results(job, source.count, file)


def _is_of_results(name: str) -> bool:
    """Whether a run gives a file this name, for good or until it is whole."""
    alone = (_MANIFEST, _LOCK, _LEDGER, INDEX, _SUMS, SUMMARY)
    return name in alone or fnmatch(name, PARTIAL) or _NUMBERED.fullmatch(name) is not None


def _refuse_what_others_wrote(out: Path) -> None:
    """Files under names of ours are ours only beside our manifest, the first that a run writes."""
    manifest = out / _MANIFEST
    if manifest.exists():
        try:
            written = json.loads(manifest.read_text(encoding="utf-8"))
        except ValueError:
            return  # damaged, which is said where it is read
        if not isinstance(written, dict) or "ikattn" not in written:
            raise AnalyzeError(f"{manifest} was not written by this program; take another --out")
        return
    for name in (_LEDGER, INDEX, _SUMS, SUMMARY):
        if (out / name).exists():
            raise AnalyzeError(
                f"{out / name} was not written by this program, which finds no manifest.json "
                "beside it; take another --out"
            )


def _compare_manifest(job: Job, source: Source, target: Source | None) -> None:
    """Writes the manifest of a new run, or makes sure that the old one asks for the same."""
    path = job.out / _MANIFEST
    wishes = {  # all that decides about results; batch size and device do not
        "ikattn": version(),
        "model": job.model,
        "model files": _fingerprint(Path(job.model), job.out),
        "text": {"lines": source.count, "sha256": source.digest},
        "target text": target and {"lines": target.count, "sha256": target.digest},
        "maps": list(job.maps),
        "layers": job.layers and list(job.layers),
        "formats": list(job.formats),
        "max-length": job.max_length,
    }
    if path.exists():
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name in wishes if earlier.get(name) != wishes[name]]
        except (ValueError, AttributeError):
            raise AnalyzeError(f"{path} is damaged; --restart begins anew") from None
        if not changed:
            return
        entries = _entries(job.out / _LEDGER, source.count)
        if any(number for _, number in entries) or _lines_of_sums(job.out, source.count):
            raise AnalyzeError(
                f"{job.out} holds the results of a run with other {', '.join(changed)}; take "
                "another --out, or --restart to replace them"
            )
    with whole_file(path) as file:  # also over that of a run which came to nothing
        file.write(json.dumps(wishes, indent=2).encode() + b"\n")


def _fingerprint(folder: Path, out: Path) -> str | None:
    """Names, sizes and times of a model's files: to read gigabytes of weights takes too long.

    out: Where results are, which may be among them.
    """
    if not folder.is_dir():
        return None
    digest, results = hashlib.sha256(), out.resolve()
    for path in sorted(folder.rglob("*")):
        ours = _is_of_results(path.name) and path.parent.resolve() == results
        if path.is_file() and not ours:
            stat = path.stat()
            digest.update(
                f"{path.relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}\n".encode()
            )
    return digest.hexdigest()


def _lines_of_sums(out: Path, total: int) -> list[int]:
    """The numbers of lines whose sums are in files of their own; a run that was killed left two."""
    names = [path.name for path in out.glob("sums-*.npz") if _NUMBERED.fullmatch(path.name)]
    parts = [int(name[len("sums-") : -len(".npz")]) for name in names]
    whole = [total] if (out / _SUMS).is_file() else []
    return [lines for lines in parts if lines < total] + whole


def _entries(path: Path, total: int) -> Iterator[tuple[bytes, int]]:
    """Each line of lines.jsonl, and the line of the text that it tells finished; 0: none."""
    if not path.exists():
        return
    done = bytearray(total + 1)
    with path.open("rb") as lines:
        for text in lines:
            number = 0  # of an entry that is none, or whose files are not there
            with suppress(ValueError, TypeError, KeyError, OSError):
                entry: Any = json.loads(text) if text.endswith(b"\n") else None
                files = [(path.parent / name).stat() for name in entry["files"]]
                number = int(entry["line"]) if all(file.st_size for file in files) else 0
            is_new = 0 < number <= total and not done[number]
            if is_new:
                done[number] = 1
            yield text, number if is_new else 0
