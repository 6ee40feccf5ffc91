"""``python -m ikattn analyze``: maps of every line of a text, as files in one directory.

    DIR/line-000017.npz    the maps of line 17, its padding cut off; other formats likewise
    DIR/index.html         the lines, to find and sort, with links to their pages, where pages
                           were asked for
    DIR/sums.npz           the sums of all lines' maps, where these were asked for, and
    DIR/summary.html       a page of their means

Whatever stops a run, the directory tells what is finished (results.py), and the same command does
the rest. In memory are one batch of lines and a byte for each line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from ikattn.cli.errors import AnalyzeError, doing
from ikattn.cli.index import overview, write_index
from ikattn.cli.job import Job, Line, Source, drawable_maps, lines_between_saves, read_lines
from ikattn.cli.model import AnalyzedModel
from ikattn.cli.results import INDEX, SUMMARY, Results, open_results
from ikattn.cli.summary import write_summary
from ikattn.maps.layers import Batch
from ikattn.maps.recording import Recording

_NEEDS = {"npz": ("numpy", "numpy"), "png": ("matplotlib", "'ikattn[viz]'")}
_NEEDS |= {"sums": ("numpy", "numpy")}
_PAGES = ("html", "png")  # what is to be looked at: an empty line has none


def analyze(job: Job, source: Source, target: Source | None, say: Callable[[str], None]) -> int:
    """Does what of the job is not done yet, and returns how many lines the directory now holds.

    ``say`` receives notices, one line each. AnalyzeError says why the job cannot be done or
    finished, KeyboardInterrupt how many lines are finished, which stay.
    """
    if target is not None and target.count != source.count:
        raise AnalyzeError(
            f"the target must have as many lines as the text, {source.count}, got {target.count}"
        )
    # Results that are there are given up only for a run that can begin.
    model = AnalyzedModel.load(job, has_target=target is not None) if job.restart else None
    with open_results(job, source, target) as results:
        if results.count == results.total:
            say(f"all {results.total} lines are done already")
        else:
            _run(job, model, source, target, results, say)
        if results.count < results.total:
            raise AnalyzeError(
                f"the text had {results.total} lines before the run, of which {results.count} were "
                "found: it must not change meanwhile"
            )
        if "html" in job.formats:
            write_index(job.out / INDEX, job.model, results.ledger)
        if "sums" in job.formats:
            write_summary(job.out / SUMMARY, results.sums)
        return results.count


def _run(
    job: Job,
    loaded: AnalyzedModel | None,
    source: Source,
    target: Source | None,
    results: Results,
    say: Callable[[str], None],
) -> None:
    if results.count:
        say(f"resuming: {results.count} of {results.total} lines are done")
    try:
        model = loaded or AnalyzedModel.load(job, has_target=target is not None)
        lines = (x for x in read_lines(source, target) if not results.has(x.number))
        tqdm = import_module("tqdm").tqdm  # which transformers requires
        sizes = {"total": results.total, "initial": results.reached}
        with tqdm(**sizes, unit="line", file=sys.stderr) as bar:
            note = partial(bar.write, file=sys.stderr)
            while chunk := list(islice(lines, job.batch_size)):
                for line, recording, truncated in _maps_of(job, model, chunk, note):
                    if not results.has_files(line.number):
                        names = _write_line(job, line, recording)
                        results.add_entry(_entry(job, line, recording, truncated, names))
                    results.add_to_sums(line.number, recording)
                    bar.update(results.reached - bar.n)
                if results.unsaved >= lines_between_saves(results.total):
                    results.save_sums()
            results.save_sums()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted after {results.count} of {results.total} lines; the same command goes on "
            "from there"
        ) from None


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


def check_libraries(job: Job) -> None:
    """Raises AnalyzeError, before anything is read, where a library or the model is missing."""
    needs = {"transformers": "'ikattn[analyze]'"}
    needs |= {library: source for kind, (library, source) in _NEEDS.items() if kind in job.formats}
    for library, source in needs.items():
        if find_spec(library) is None:
            raise AnalyzeError(f"this needs {library}: pip install {source}")
    looks_like_path = job.model.startswith((".", "~", os.sep)) or job.model.count("/") > 1
    if looks_like_path and not Path(job.model).is_dir():
        raise AnalyzeError(f"there is no model directory {job.model}")
