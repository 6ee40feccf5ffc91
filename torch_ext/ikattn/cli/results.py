"""The directory of ``python -m ikattn analyze``: what is finished in it, and whose it is."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from ikattn._library import version
from ikattn._whole_files import PARTIAL, whole_file
from ikattn.cli.errors import AnalyzeError, doing
from ikattn.cli.job import LINE_FORMATS, Job, Source
from ikattn.cli.parts import SUMMARY, SUMS
from ikattn.cli.progress import Ledger, lines_of, read_entry


@contextmanager
def open_results(job: Job, source: Source, target: Source | None) -> Iterator[Ledger]:
    """The directory of results, in the state in which earlier runs left it.

    It is this process's alone where the job has one shard. Processes of several shards share it:
    the first to come puts it in order, and each has its shard to itself.

    Raises:
        AnalyzeError: It is not writable, another run is at work in it or on this shard, or it holds
            the results of another job.
    """
    with ExitStack() as held:
        with doing(f"cannot write to {job.out}"):
            job.out.mkdir(parents=True, exist_ok=True)
            run = held.enter_context((job.out / _LOCK).open("w+"))
        if job.shard.count == 1:
            _take(run, fcntl.LOCK_EX, f"another run is writing to {job.out}")
            _put_in_order(job, source, target)
        else:
            _enter_with_others(job, source, target, run, held)
        path = job.out / "lines.jsonl"
        file = held.enter_context(path.open("a+b"))
        yield Ledger(path, file, source.count)


@contextmanager
def one_at_a_time(job: Job) -> Iterator[None]:
    """For coming in, and for what is made of all lines: one process of a shared directory."""
    if job.shard.count == 1:
        yield
        return
    with (job.out / _ENTRANCE).open("w+") as entrance:
        fcntl.flock(entrance, fcntl.LOCK_EX)
        yield


_MANIFEST, _LOCK = "manifest.json", ".lock"
_ENTRANCE = ".lock-entrance"  # of processes that share the directory, one at a time
_ALONE = (_MANIFEST, _LOCK, "lines.jsonl", "index.html", SUMS, SUMMARY)


def _take(lock: IO[str], mode: int, refusal: str) -> None:
    """Locks a file, which is open to read and write, as NFS wants it."""
    try:
        fcntl.flock(lock, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AnalyzeError(refusal) from None


def _enter_with_others(
    job: Job, source: Source, target: Source | None, run: IO[str], held: ExitStack
) -> None:
    """Shares the directory with the processes of other shards."""
    refusal = f"another run, of all lines, is writing to {job.out}"
    with one_at_a_time(job):
        try:
            fcntl.flock(run, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # others are at work, in what they put in order
            _take(run, fcntl.LOCK_SH, refusal)
            _refuse_what_others_wrote(job.out)
            _compare_manifest(job, source, target, is_alone=False)
            if job.restart:
                raise AnalyzeError(f"another run is writing to {job.out}") from None
        else:
            _put_in_order(job, source, target)
            _take(run, fcntl.LOCK_SH, refusal)
    name = f"{_LOCK}-shard-{job.shard.number}-of-{job.shard.count}"
    own = held.enter_context((job.out / name).open("w+"))
    _take(own, fcntl.LOCK_EX, f"another run is doing {job.shard} in {job.out}")
    held.callback((job.out / name).unlink, missing_ok=True)


def _put_in_order(job: Job, source: Source, target: Source | None) -> None:
    """Puts a directory in order, which only a process that is alone may do."""
    _refuse_what_others_wrote(job.out)
    if job.restart:
        _remove_results(job.out)
    for partial in job.out.glob(PARTIAL):  # of a run that was killed
        partial.unlink()
    _compare_manifest(job, source, target, is_alone=True)
    _drop_unsound_entries(job.out / "lines.jsonl", source.count)


def _is_of_results(name: str) -> bool:
    """Whether a run gives a file this name, for good or until it is whole."""
    names = (
        rf"line-\d{{6,}}\.({'|'.join(LINE_FORMATS)})",
        r"part-\d{6,}\.(parquet|arrow)",
        r"sums-\d{6,}\.npz",
        rf"{re.escape(_LOCK)}-(entrance|shard-\d+-of-\d+)",
    )
    return (
        name in _ALONE
        or fnmatch(name, PARTIAL)
        or any(re.fullmatch(pattern, name) for pattern in names)
    )


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
    for name in ("lines.jsonl", "index.html", SUMS, SUMMARY):
        if (out / name).exists():
            raise AnalyzeError(
                f"{out / name} was not written by this program, which finds no manifest.json "
                "beside it; take another --out"
            )


def _remove_results(out: Path) -> None:
    """Removes the files that a run writes, and no others; no entry outlives its files."""
    (out / "lines.jsonl").unlink(missing_ok=True)
    for path in out.iterdir():
        if _is_of_results(path.name) and path.name not in (_MANIFEST, _LOCK, _ENTRANCE):
            path.unlink()
    (out / _MANIFEST).unlink(missing_ok=True)  # without which the others would not be ours


def _compare_manifest(job: Job, source: Source, target: Source | None, *, is_alone: bool) -> None:
    """Writes the manifest of a new run, or makes sure that the old one asks for the same."""
    wishes = _wishes(job, source, target)
    path = job.out / _MANIFEST

    def write() -> None:
        with whole_file(path) as file:
            file.write(json.dumps(wishes, indent=2).encode() + b"\n")

    if not path.exists():
        write()
        return
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in wishes if earlier.get(name) != wishes[name]]
    except (ValueError, AttributeError):
        raise AnalyzeError(f"{path} is damaged; --restart begins anew") from None
    if changed and is_alone and not _has_entries(job.out / "lines.jsonl", source.count):
        (job.out / SUMS).unlink(missing_ok=True)  # of lines whose entries are lost
        write()  # over that of a run which came to nothing
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
        "layers": job.layers and list(job.layers),
        "formats": list(job.formats),
        "lines in a part": job.lines_in_a_part(source.count) if job.part_formats else None,
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


def _has_entries(path: Path, total: int) -> bool:
    return any(is_sound for _, is_sound in _entries(path, total))


def _drop_unsound_entries(path: Path, total: int) -> None:
    """Takes away entries that were cut off, came twice, or have lost their files."""
    if all(is_sound for _, is_sound in _entries(path, total)):
        return
    with whole_file(path) as file:
        for text, is_sound in _entries(path, total):
            if is_sound:
                file.write(text)


def _entries(path: Path, total: int) -> Iterator[tuple[bytes, bool]]:
    """Each line of lines.jsonl, and whether its entry stands for finished lines of the text."""
    if not path.exists():
        return
    done = bytearray(total)
    with path.open("rb") as lines:
        for text in lines:
            entry = read_entry(text) if text.endswith(b"\n") else None
            if entry is None or not _has_files(path.parent, entry):
                yield text, False
                continue
            own = lines_of(entry)
            begin, end = own.start - 1, own.stop - 1
            is_new = 0 <= begin < end <= total and not any(done[begin:end])
            if is_new:
                done[begin:end] = b"\1" * (end - begin)
            yield text, is_new


def _has_files(folder: Path, entry: dict[str, Any]) -> bool:
    """Whether the files of an entry are there; sums of a part may be in those of all lines."""
    whole = (folder / SUMS).is_file()
    paths = [folder / name for name in entry["files"] if not (whole and name.startswith("sums-"))]
    return all(path.is_file() and path.stat().st_size > 0 for path in paths)
