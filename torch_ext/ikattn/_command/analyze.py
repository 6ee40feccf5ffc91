"""``python -m ikattn analyze``: maps of every line of a text, as files in one directory.

    DIR/manifest.json      what was asked for; a run with other wishes is refused
    DIR/lines.jsonl        one entry for each finished line, in the order they were finished
    DIR/line-000017.npz    the maps of line 17, its padding cut off; other formats likewise
    DIR/index.html         the lines, to find and sort, with links to their pages, where pages
                           were asked for

A line's files are written whole, each under its final name at once; only then does its entry go to
lines.jsonl, and to the disk. So whatever stops a run, its entries tell what is finished, and the
same command does the rest. In memory are one batch of lines and the numbers of the finished ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from ikattn._command.index import overview, write_index
from ikattn._command.job import AnalyzeError, Job, Line, Source, drawable_maps, read_lines
from ikattn._command.model import AnalyzedModel
from ikattn._command.results import Ledger, open_results
from ikattn.analysis.maps import Batch
from ikattn.analysis.recording import Recording

__all__ = ["analyze"]

_NEEDS = {"npz": ("numpy", "numpy"), "png": ("matplotlib", "'ikattn[viz]'")}
_PAGES = ("html", "png")  # what is to be looked at: an empty line has none


def analyze(job: Job, say: Callable[[str], None]) -> int:
    """Does what of the job is not done yet.

    Args:
        job: What to do.
        say: Receives notices, one line each.

    Returns:
        How many lines the directory now holds.

    Raises:
        AnalyzeError: The job cannot be done, or not be finished; the message says why.
        KeyboardInterrupt: With the number of finished lines; what is finished stays.
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
    # What is there is given up only for a run that can begin.
    model = AnalyzedModel.load(job, has_target=target is not None) if job.restart else None
    with open_results(job, source, target) as ledger:
        if ledger.count == source.count:
            say(f"all {source.count} lines are done already")
        else:
            _run(job, model, source, target, ledger, say)
        if ledger.count != source.count:
            raise AnalyzeError(
                f"the text had {source.count} lines before the run, of which {ledger.count} were "
                "found: it must not change meanwhile"
            )
        if "html" in job.formats:
            write_index(job, ledger)
        return ledger.count


def _run(
    job: Job,
    loaded: AnalyzedModel | None,
    source: Source,
    target: Source | None,
    ledger: Ledger,
    say: Callable[[str], None],
) -> None:
    if ledger.count:
        say(f"resuming: {ledger.count} of {source.count} lines are done")
    try:
        model = loaded or AnalyzedModel.load(job, has_target=target is not None)
        waiting = (line for line in read_lines(source, target) if line.number not in ledger.done)
        with _progress(source.count, ledger.count) as (advance, note):
            while chunk := list(islice(waiting, job.batch_size)):
                for line, recording, truncated in _maps_of(job, model, chunk):
                    if truncated:
                        note(f"line {line.number}: {truncated} tokens, cut to {model.max_length}")
                    ledger.add(_write_line(job, line, recording, bool(truncated)))
                    advance()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{ledger.count} of {source.count}") from None


def _maps_of(
    job: Job, model: AnalyzedModel, chunk: Sequence[Line]
) -> Iterator[tuple[Line, Recording, int]]:
    """Each line's own recording, and its length in tokens where it had to be cut, else 0."""
    full = [line for line in chunk if not line.empty and model.has_tokens(line)]
    try:
        found = iter(model.record(full) if full else ())
    except (ValueError, NotImplementedError, RuntimeError, TypeError, IndexError) as error:
        numbers = f"lines {full[0].number} to {full[-1].number}"
        raise AnalyzeError(f"{numbers}: {error}") from error
    numbers_of_full = {line.number for line in full}
    for line in chunk:
        if line.number not in numbers_of_full:
            nothing = Batch(tokens=[[]], target_tokens=None if line.target is None else [[]])
            yield line, Recording(job.model, job.maps, {}, [nothing]), 0
        else:
            recording, truncated = next(found)
            yield line, recording, truncated


def _write_line(job: Job, line: Line, recording: Recording, truncated: bool) -> dict[str, Any]:
    """Writes a line's files and returns its entry."""
    names = []
    for kind in job.formats:
        if not recording.layers and kind in _PAGES:
            continue
        path = job.out / f"line-{line.number:06d}.{kind}"
        if kind == "html":
            recording.to_html(path, title=line.text.strip()[:120])
        elif kind == "png":
            recording.plot(path, map=_pictured(job.maps))
        else:
            recording.save(path)
        names.append(path.name)
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
        "files": names,
    }


def _pictured(maps: Sequence[str]) -> str:
    """What a picture shows beside the weights."""
    names = [name for name in drawable_maps(maps) if name not in ("weights", "similarity")]
    return next((name for name in ("summed", *names) if name in names), "weights")


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
def _progress(total: int, done: int) -> Iterator[tuple[Callable[[], Any], Callable[[str], Any]]]:
    """How to count one line more, and how to write a notice beside the counter."""
    if find_spec("tqdm") is None:
        count = iter(range(done + 1, total + 1))

        def advance() -> None:
            number = next(count)
            if number % max(1, total // 20) == 0 or number == total:
                print(f"{number} of {total} lines", file=sys.stderr)

        yield advance, lambda text: print(text, file=sys.stderr)
        return
    with import_module("tqdm").tqdm(total=total, initial=done, unit="line", file=sys.stderr) as bar:
        yield bar.update, lambda text: bar.write(text, file=sys.stderr)
