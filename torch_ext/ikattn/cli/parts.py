"""Files of many lines each: tables of maps, and their sums.

    DIR/part-000012.parquet    a row for each line of the 12th part of the lines; .arrow likewise
    DIR/sums-000012.npz        the sums of that part's maps
    DIR/sums.npz               those of all lines, in the place of the parts' when all are done

A file is named by its part and written whole. Whoever does a part again writes the same file again,
so that nothing is in a result twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ikattn._library import version
from ikattn._optional import optional
from ikattn._whole_files import whole_file
from ikattn.cli.errors import AnalyzeError, doing
from ikattn.cli.job import Job, Line, single_maps
from ikattn.cli.summary import write_summary
from ikattn.explain.corpora.corpus import CorpusSums
from ikattn.maps.contribution_maps import SUMMED_MAPS, Contributions
from ikattn.maps.files import DEFINITIONS
from ikattn.maps.recording import Recording
from ikattn.maps.sequences import AXES
from ikattn.maps.summary import full_precision

SUMS, SUMMARY = "sums.npz", "summary.html"
_NUMBERS_AT_ONCE = 1 << 24  # that are held before they are written


@dataclass
class PartWriter:
    """The files of one part of the lines while they are being written.

    Attributes:
        names: Of the files.
        tables: Those of the formats parquet and arrow.
        sums: Of the maps; None where they are not asked for.
    """

    names: list[str] = field(default_factory=list)
    tables: list[_TableWriter] = field(default_factory=list)
    sums: CorpusSums | None = None

    def add(self, line: Line, recording: Recording, truncated: bool) -> None:
        """Adds one line's maps."""
        if self.sums is not None and recording.layers:
            with doing(f"line {line.number}"):
                self.sums.add(recording)
        for table in self.tables:
            table.add(line, recording, truncated)


@contextmanager
def open_part(job: Job, part: int, dtype: torch.dtype) -> Iterator[PartWriter]:
    """The files of a part, which appear when the block ends without an exception.

    Args:
        job: With formats of parts.
        part: From 0.
        dtype: Of the maps in tables, float64 or float32.
    """
    writer = PartWriter()
    with ExitStack() as stack:
        for kind in job.part_formats:
            if kind == "sums":
                writer.sums = CorpusSums()
                writer.names.append(_name_of_sums(part))
            else:
                name = f"part-{part + 1:06d}.{kind}"
                writer.tables.append(stack.enter_context(_open_table(job, job.out / name, dtype)))
                writer.names.append(name)
        yield writer
    if writer.sums is not None:
        writer.sums.save(job.out / _name_of_sums(part))


def _name_of_sums(part: int) -> str:
    return f"sums-{part + 1:06d}.npz"


def merge_sums(out: Path, parts: int) -> None:
    """Adds up the sums of all parts in their order, so that the bits are the same for any shards.

    Raises:
        AnalyzeError: The file of a part is damaged.
    """
    total = out / SUMS
    if not total.is_file():
        found = CorpusSums()
        for part in range(parts):
            path = out / _name_of_sums(part)
            with doing(f"remove {path}, and the same command does its lines again"):
                found += CorpusSums.load(path)
        found.save(total)
    write_summary(out / SUMMARY, CorpusSums.load(total))
    for path in out.glob("sums-*.npz"):
        path.unlink(missing_ok=True)


@contextmanager
def _open_table(job: Job, path: Path, dtype: torch.dtype) -> Iterator[_TableWriter]:
    arrow = optional("pyarrow", f"--format {path.suffix[1:]}", "'ikattn[corpora]'")
    table = _TableWriter(arrow, job, dtype)
    with whole_file(path) as file, ExitStack() as stack:
        if path.suffix == ".parquet":
            parquet = optional("pyarrow.parquet", "--format parquet", "'ikattn[corpora]'")
            table.file = stack.enter_context(parquet.ParquetWriter(file, table.schema))
        else:
            table.file = stack.enter_context(arrow.ipc.new_file(file, table.schema))
        yield table
        table.flush()


class _TableWriter:
    """Rows of lines. A map's column has a list over layers, null where a layer has it not."""

    def __init__(self, arrow: Any, job: Job, dtype: torch.dtype) -> None:
        self.file: Any = None
        self._arrow, self._dtype, self._job = arrow, dtype, job
        self._maps = _columns(job)
        self._rows: list[dict[str, Any]] = []
        self._layers: list[list[Contributions]] = []
        self._numbers = 0
        self._number = arrow.float64() if dtype == torch.float64 else arrow.float32()
        self.schema = self._schema()

    def _schema(self) -> Any:
        arrow = self._arrow
        words = arrow.list_(arrow.string())
        fields = [("line", arrow.int64()), ("text", arrow.string()), ("target", arrow.string())]
        fields += [("truncated", arrow.bool_()), ("tokens", words), ("target_tokens", words)]
        fields += [("layers", words)]
        for name, axes in self._maps.items():
            kind = self._number
            for _ in range(len(axes) + 1):
                kind = arrow.list_(kind)
            fields.append((name, kind))
        definitions = {name: DEFINITIONS[name.partition(".")[0]] for name in self._maps}
        about = {"ikattn_version": version(), "model": self._job.model, "definitions": definitions}
        return arrow.schema(fields, metadata={"ikattn": json.dumps(about)})

    def add(self, line: Line, recording: Recording, truncated: bool) -> None:
        batch = recording.batches[0]
        row: dict[str, Any] = {"line": line.number, "text": line.text, "target": line.target}
        row |= {"truncated": truncated, "layers": list(batch)}
        for name in ("tokens", "target_tokens"):
            tokens = getattr(batch, name)
            row[name] = None if tokens is None else list(tokens[0])
        self._rows.append(row)
        self._layers.append(list(batch.values()))
        self._numbers += sum(
            x.numel()
            for maps in batch.values()
            for x in (_map_of(maps, name) for name in self._maps)
            if x is not None
        )
        if self._numbers >= _NUMBERS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Writes the rows that are held: a group of them in Parquet, a batch in Arrow."""
        if not self._rows:
            return
        arrow = self._arrow
        columns = []
        for name, kind in zip(self.schema.names, self.schema.types, strict=True):
            if name in self._maps:
                lines = [[_map_of(maps, name) for maps in one] for one in self._layers]
                columns.append(self._nested(lines, len(self._maps[name])))
            else:
                columns.append(arrow.array([row[name] for row in self._rows], kind))
        self.file.write(arrow.record_batch(columns, schema=self.schema))
        self._rows, self._layers, self._numbers = [], [], 0

    def _nested(self, lines: Sequence[Sequence[Tensor | None]], axes: int) -> Any:
        """``[lines][layers]`` and the axes of a map, as lists of lists."""
        arrow = self._arrow
        tensors = [x for layers in lines for x in layers]
        present = [full_precision(x[0]).to("cpu", self._dtype) for x in tensors if x is not None]
        empty = torch.zeros(0, dtype=self._dtype, device="cpu")
        found = arrow.array(torch.cat([empty, *(x.flatten() for x in present)]).numpy())
        for axis in reversed(range(1, axes)):
            counts = torch.tensor([prod(x.shape[:axis]) for x in present], device="cpu")
            sizes = torch.tensor([x.shape[axis] for x in present], device="cpu")
            found = self._lists(sizes.repeat_interleave(counts), found)
        sizes = torch.tensor([0 if x is None else x.shape[1] for x in tensors], device="cpu")
        found = self._lists(sizes, found, [x is None for x in tensors])
        return self._lists(torch.tensor([len(layers) for layers in lines], device="cpu"), found)

    def _lists(self, sizes: Tensor, values: Any, nulls: Sequence[bool] | None = None) -> Any:
        """Lists of these sizes one after the other, some of which are null."""
        arrow = self._arrow
        ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).long()
        if ends[-1] >= 1 << 31:
            raise AnalyzeError(
                f"line {self._rows[-1]['line']}: a map must have less than 2^31 numbers to be in a "
                f"table, got {int(ends[-1])}; take fewer maps, or another format"
            )
        mask = None if nulls is None else arrow.array(nulls, arrow.bool_())
        return arrow.ListArray.from_arrays(arrow.array(ends.int().numpy()), values, mask=mask)


def _columns(job: Job) -> dict[str, str]:
    """The maps of a table and their axes."""
    names = [name for name in single_maps(job.maps) if name in AXES]
    if "mixing_ratio" in single_maps(job.maps):
        names += [f"mixing_ratio.{name}" for name in SUMMED_MAPS]
    return {name: AXES.get(name, "L") for name in names}


def _map_of(maps: Contributions, name: str) -> Tensor | None:
    ratio, _, of_map = name.partition(".")
    found: Tensor | None = maps.mixing_ratio.get(of_map) if of_map else getattr(maps, ratio)
    return found
