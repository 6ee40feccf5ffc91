"""``python -m ikattn analyze``: maps of every line of a text, as files in one directory.

    DIR/manifest.json      what was asked for; a run with other wishes is refused
    DIR/lines.jsonl        one entry for each finished line, in the order they were finished
    DIR/line-000017.npz    the maps of line 17, its padding cut off; other formats likewise
    DIR/index.html         the lines, to find and sort, with links to their pages, where pages
                           were asked for

Tables and sums are files of many lines (parts.py), of which lines.jsonl has an entry for each part.

A line's files are written whole, each under its final name at once; only then does its entry go to
lines.jsonl, and to the disk. So whatever stops a run, its entries tell what is finished, and the
same command does the rest. In memory are one batch of lines and a byte for each line.

Several processes may share a directory, each with its shard of the lines (shards.py). They talk
through lines.jsonl alone (ledger.py); who finishes the last line makes what is made of all lines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ikattn.cli.errors import AnalyzeError, doing
from ikattn.cli.index import overview, write_index
from ikattn.cli.job import Job, Line, Source, drawable_maps, read_lines
from ikattn.cli.model import AnalyzedModel
from ikattn.cli.parts import SUMS, merge_sums, open_part
from ikattn.cli.progress import Ledger
from ikattn.cli.results import one_at_a_time, open_results
from ikattn.maps.layers import Batch
from ikattn.maps.recording import Recording

_NEEDS = {"npz": ("numpy", "numpy"), "png": ("matplotlib", "'ikattn[viz]'")}
_NEEDS |= {"sums": ("numpy", "numpy")}
_NEEDS |= dict.fromkeys(("parquet", "arrow"), ("pyarrow", "'ikattn[corpora]'"))
_PAGES = ("html", "png")  # what is to be looked at: an empty line has none
_SECONDS_BETWEEN_LOOKS = 0.5


def analyze(job: Job, say: Callable[[str], None]) -> int:
    """Does what of the job, and of its shard of it, is not done yet.

    Args:
        job: What to do.
        say: Receives notices, one line each.

    Returns:
        How many lines the directory now holds.

    Raises:
        AnalyzeError: The job cannot be done, or not be finished; the message says why.
        KeyboardInterrupt: With a sentence on the finished lines, which stay.
    """
    _check_libraries(job)
    source = Source.of("--text", job.texts, job.file)
    target = None
    if job.target_texts is not None or job.target_file is not None:
        target = Source.of("--target-text", job.target_texts, job.target_file)
        if target.count != source.count:
            raise AnalyzeError(
                f"the target must have as many lines as the text, {source.count}, "
                f"got {target.count}"
            )
    # Results that are there are given up only for a run that can begin.
    model = AnalyzedModel.load(job, has_target=target is not None) if job.restart else None
    job = _restarted(job, source, target)
    with open_results(job, source, target) as ledger:
        is_done = ledger.count == source.count
        if is_done:
            _say_once(job, say, f"all {source.count} lines are done already")
        else:
            _run(job, model, source, target, ledger, say)
        if ledger.missing(job.shard, job.lines_in_a_part(source.count)):
            raise _changed(source.count, ledger.count)
        if ledger.count == source.count:
            _finish(job, ledger, is_first=is_done and job.shard.number == 1)
        else:
            left = source.count - ledger.count
            _say_once(job, say, f"{job.shard} is done; others have {left} lines to do")
        return ledger.count


def _changed(expected: int, found: int) -> AnalyzeError:
    return AnalyzeError(
        f"the text had {expected} lines before the run, of which {found} were found: it must not "
        "change meanwhile"
    )


def _restarted(job: Job, source: Source, target: Source | None) -> Job:
    """The job without its wish to begin anew, where ranks of torchrun have one for all of them."""
    if not job.restart or job.shard.ranks == 1:
        return job
    if job.shard.restarts == 0:  # else what the ranks have done before they were started again
        if job.shard.rank == 0:
            with open_results(job, source, target):
                pass
        job.shard.wait_for_others()
    return replace(job, restart=False)


def _run(
    job: Job,
    loaded: AnalyzedModel | None,
    source: Source,
    target: Source | None,
    ledger: Ledger,
    say: Callable[[str], None],
) -> None:
    if ledger.count:
        _say_once(job, say, f"resuming: {ledger.count} of {source.count} lines are done")
    try:
        model = loaded or AnalyzedModel.load(job, has_target=target is not None)
        with _progress(job, ledger) as (advance, note):
            if job.part_formats:
                _do_parts(job, model, read_lines(source, target), ledger, advance, note)
            else:
                _do_lines(job, model, read_lines(source, target), ledger, advance, note)
            while job.shard.waits and ledger.count < ledger.total:  # for the other ranks
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                ledger.follow()
                advance(0)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted after {ledger.count} of {source.count} lines; the same command goes on "
            "from there"
        ) from None


def _do_lines(
    job: Job,
    model: AnalyzedModel,
    lines: Iterator[Line],
    ledger: Ledger,
    advance: Callable[[int], Any],
    note: Callable[[str], Any],
) -> None:
    """Each line is finished by itself."""
    waiting = (
        line
        for line in lines
        if job.shard.has(line.number - 1) and not ledger.has(range(line.number, line.number + 1))
    )
    while chunk := list(islice(waiting, job.batch_size)):
        for line, recording, truncated in _maps_of(job, model, chunk, note):
            names = _write_line(job, line, recording)
            ledger.add([_entry(job, line, recording, truncated, names)])
            advance(0)
        ledger.follow()


def _do_parts(
    job: Job,
    model: AnalyzedModel,
    lines: Iterator[Line],
    ledger: Ledger,
    advance: Callable[[int], Any],
    note: Callable[[str], Any],
) -> None:
    """The lines of a part are finished together: with the files that they share."""
    size = job.lines_in_a_part(ledger.total)
    for part, waiting in groupby(lines, lambda line: (line.number - 1) // size):
        if not job.shard.has(part):
            continue
        ledger.follow()
        own = range(part * size + 1, min((part + 1) * size, ledger.total) + 1)
        if ledger.has(own):
            continue
        entries = []
        number = 0
        with open_part(job, part, model.map_dtype) as writer:
            while chunk := list(islice(waiting, job.batch_size)):
                for line, recording, truncated in _maps_of(job, model, chunk, note):
                    number = line.number
                    writer.add(line, recording, truncated)
                    if job.line_formats:
                        names = [*_write_line(job, line, recording), *writer.names]
                        entries.append(_entry(job, line, recording, truncated, names))
                ledger.follow()
                advance(number - own[0] + 1)
            if number != own[-1]:
                raise _changed(ledger.total, number)
        if not job.line_formats:
            entries = [{"line": own[0], "through": own[-1], "files": writer.names}]
        ledger.add(entries)
        advance(0)


def _finish(job: Job, ledger: Ledger, *, is_first: bool) -> None:
    """Makes what is made of all lines, where it is ours to make or somebody has not made it."""
    results = {"html": "index.html", "sums": SUMS}
    wanted = [name for kind, name in results.items() if kind in job.formats]
    is_ours = ledger.is_last or is_first or job.shard.count == 1
    with one_at_a_time(job):
        if "index.html" in wanted and (is_ours or not (job.out / "index.html").is_file()):
            write_index(job, ledger)
        if SUMS in wanted:
            merge_sums(job.out, -(-ledger.total // job.lines_in_a_part(ledger.total)))


def _say_once(job: Job, say: Callable[[str], None], text: str) -> None:
    if job.shard.speaks:
        say(text)


def _maps_of(
    job: Job, model: AnalyzedModel, chunk: Sequence[Line], note: Callable[[str], Any]
) -> Iterator[tuple[Line, Recording, bool]]:
    """Each line's own recording, and whether it had to be cut, which is told."""
    with doing(f"lines {chunk[0].number} to {chunk[-1].number}"):
        full = [line for line in chunk if not line.empty and model.has_tokens(line)]
        found = iter(model.record(full) if full else ())
    numbers_of_full = {line.number for line in full}
    for line in chunk:
        if line.number not in numbers_of_full:
            nothing = Batch(tokens=[[]], target_tokens=None if line.target is None else [[]])
            yield line, Recording(job.model, job.maps, {}, [nothing]), False
        else:
            recording, length = next(found)
            if length:
                note(f"line {line.number}: {length} tokens, cut to {model.max_length}")
            yield line, recording, bool(length)


def _write_line(job: Job, line: Line, recording: Recording) -> list[str]:
    """Writes a line's own files and returns their names."""
    names = []
    for kind in job.line_formats:
        if not recording.layers and kind in _PAGES:
            continue
        path = job.out / f"line-{line.number:06d}.{kind}"
        if kind == "html":
            recording.to_html(path, title=line.text.strip()[:120])
        elif kind == "png":
            recording.plot(path, map=_pictured(job, recording))
        else:
            recording.save(path)
        names.append(path.name)
    return names


def _entry(
    job: Job, line: Line, recording: Recording, truncated: bool, files: list[str]
) -> dict[str, Any]:
    """Returns a line's entry in lines.jsonl."""
    batch = recording.batches[0]
    return {
        "line": line.number,
        "text": line.text,
        "target": line.target,
        "empty": not recording.layers,
        "truncated": truncated,
        "tokens": None if batch.tokens is None else list(batch.tokens[0]),
        "target_tokens": None if batch.target_tokens is None else list(batch.target_tokens[0]),
        "overview": overview(recording, job.maps),
        "files": files,
    }


def _pictured(job: Job, recording: Recording) -> str | None:
    """Returns the map that a picture shows beside the weights: the sum, or the first there is."""
    names = [name for name in drawable_maps(job.maps) if name not in ("weights", "similarity")]
    layers = recording.batches[0].values()
    there = [x for x in ("summed", *names) if any(getattr(maps, x) is not None for maps in layers)]
    return next(iter(there), None)


def _check_libraries(job: Job) -> None:
    """Before anything is loaded: what this job needs and whether its model can exist."""
    needs = {"transformers": "'ikattn[analyze]'"}
    needs |= {library: source for kind, (library, source) in _NEEDS.items() if kind in job.formats}
    for library, source in needs.items():
        if find_spec(library) is None:
            raise AnalyzeError(f"this needs {library}: pip install {source}")
    looks_like_path = job.model.startswith((".", "~", os.sep)) or job.model.count("/") > 1
    if looks_like_path and not Path(job.model).is_dir():
        raise AnalyzeError(f"there is no model directory {job.model}")


@contextmanager
def _progress(
    job: Job, ledger: Ledger
) -> Iterator[tuple[Callable[[int], Any], Callable[[str], Any]]]:
    """How to show the lines that all have done, and to write a notice beside their number.

    The first function takes how many more are done of a part that is not whole yet.
    """

    def note(text: str) -> None:
        print(text, file=sys.stderr)

    if not job.shard.speaks:
        yield lambda _: None, note
        return
    if find_spec("tqdm") is None:
        step = max(1, ledger.total // 20)
        shown = ledger.count

        def advance(_: int) -> None:
            nonlocal shown
            if ledger.count // step > shown // step or shown < ledger.count == ledger.total:
                shown = ledger.count
                print(f"{shown} of {ledger.total} lines", file=sys.stderr)

        yield advance, note
        return
    options = {"total": ledger.total, "initial": ledger.count, "unit": "line", "file": sys.stderr}
    with import_module("tqdm").tqdm(**options) as bar:
        yield (
            lambda more: bar.update(ledger.count + more - bar.n),
            lambda text: bar.write(text, sys.stderr),
        )
