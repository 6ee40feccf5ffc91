"""The directory of ``python -m ikattn analyze``: what is finished in it, and whose it is."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ikattn._command.job import FORMATS, AnalyzeError, Job, Source
from ikattn._library import version
from ikattn._whole_files import PARTIAL, whole_file

__all__ = ["Ledger", "open_results"]


class Ledger:
    """lines.jsonl, which says what is finished. One process at a time."""

    def __init__(self, path: Path, file: IO[str], done: set[int]) -> None:
        self.path, self.done = path, done
        self._file = file

    @property
    def count(self) -> int:
        return len(self.done)

    def add(self, entry: dict[str, Any]) -> None:
        """From here on the line is finished, even if the power fails."""
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(entry["line"])


@contextmanager
def open_results(job: Job, source: Source, target: Source | None) -> Iterator[Ledger]:
    """The directory of results, ours alone, in the state in which an earlier run left it.

    Raises:
        AnalyzeError: It is not writable, another run is at work in it, or it holds the results of
            another job.
    """
    try:
        job.out.mkdir(parents=True, exist_ok=True)
        lock = (job.out / _LOCK).open("w")
    except OSError as error:
        raise AnalyzeError(f"cannot write to {job.out}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AnalyzeError(f"another run is writing to {job.out}") from None
        try:
            _refuse_what_others_wrote(job.out)
            if job.restart:
                _remove_results(job.out)
            for partial in job.out.glob(PARTIAL):  # of a run that was killed
                partial.unlink()
            _compare_manifest(job, source, target)
            path = job.out / "lines.jsonl"
            done = _finished(path)
            with path.open("a", encoding="utf-8") as file:
                yield Ledger(path, file, done)
        except OSError as error:
            raise AnalyzeError(error.strerror or str(error)) from error


_MANIFEST, _LOCK = "manifest.json", ".lock"


def _is_of_results(name: str) -> bool:
    """Whether a run gives a file this name."""
    of_line = re.fullmatch(rf"line-\d{{6,}}\.({'|'.join(FORMATS)})", name)
    return of_line is not None or name in (_MANIFEST, _LOCK, "lines.jsonl", "index.html")


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
    for name in ("lines.jsonl", "index.html"):
        if (out / name).exists():
            raise AnalyzeError(
                f"{out / name} was not written by this program, which finds no manifest.json "
                "beside it; take another --out"
            )


def _remove_results(out: Path) -> None:
    """What a run writes, and nothing else; the entries first, that none outlives its files."""
    (out / "lines.jsonl").unlink(missing_ok=True)
    for path in out.iterdir():
        if _is_of_results(path.name) and path.name not in (_MANIFEST, _LOCK):
            path.unlink()
    (out / _MANIFEST).unlink(missing_ok=True)  # without which the others would not be ours


def _compare_manifest(job: Job, source: Source, target: Source | None) -> None:
    """Writes the manifest of a new run, or makes sure that the old one asks for the same."""
    wishes = _wishes(job, source, target)
    path = job.out / _MANIFEST

    def write() -> None:
        with whole_file(path) as file:
            file.write(json.dumps(wishes, indent=2, ensure_ascii=False).encode() + b"\n")

    if not path.exists():
        write()
        return
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in wishes if earlier.get(name) != wishes[name]]
    except (ValueError, AttributeError):
        raise AnalyzeError(f"{path} is damaged; --restart begins anew") from None
    if changed and not _finished(job.out / "lines.jsonl"):
        write()  # that of a run which came to nothing
    elif changed:
        raise AnalyzeError(
            f"{job.out} holds the results of a run with other {', '.join(changed)}; take another "
            "--out, or --restart to replace them"
        )


def _wishes(job: Job, source: Source, target: Source | None) -> dict[str, Any]:
    """All that decides about results; batch size and device do not."""
    return {
        "ikattn": version(),
        "model": job.model,
        "model files": _fingerprint(Path(job.model), job.out),
        "text": {"lines": source.count, "sha256": source.digest},
        "target text": target and {"lines": target.count, "sha256": target.digest},
        "maps": list(job.maps),
        "formats": list(job.formats),
        "max-length": job.max_length,
    }


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


def _finished(path: Path) -> set[int]:
    """Numbers of the finished lines; takes away entries that were cut off or lost their files."""
    if not path.exists():
        return set()
    done: set[int] = set()
    dropped = False
    for entry, _ in _entries(path):
        if entry is None or entry["line"] in done or not _has_files(path.parent, entry):
            dropped = True
        else:
            done.add(entry["line"])
    if dropped:
        kept: set[int] = set()
        with whole_file(path) as file:
            for entry, text in _entries(path):
                if (
                    entry is not None
                    and entry["line"] in done - kept
                    and _has_files(path.parent, entry)
                ):
                    kept.add(entry["line"])
                    file.write(text)
    return done


def _entries(path: Path) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
    """Each entry with its text; None for one that a killed run left unfinished."""
    with path.open("rb") as lines:
        for text in lines:
            try:
                entry = json.loads(text) if text.endswith(b"\n") else None
            except ValueError:
                entry = None
            is_whole = isinstance(entry, dict) and {"line", "files", "text"} <= entry.keys()
            yield entry if is_whole else None, text


def _has_files(folder: Path, entry: dict[str, Any]) -> bool:
    paths = [folder / name for name in entry["files"]]
    return all(path.is_file() and path.stat().st_size > 0 for path in paths)
