"""Lines that are a column of a table: Parquet and Arrow files, and datasets of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikattn._optional import optional
from ikattn.cli.errors import AnalyzeError, doing

_SUFFIXES = (".parquet", ".arrow")
_INSTALL = "'ikattn[corpora]'"
_ROWS = 1024  # that are read at once


@dataclass(frozen=True)
class Table:
    """A column of text.

    Attributes:
        place: A file that ends in .parquet or .arrow (the file or the stream format), a directory
            of such files, in the order of their names, or what ``Dataset.save_to_disk`` wrote; of a
            hub's dataset its name, or ``NAME:CONFIGURATION``.
        column: Its name.
        split: Of a hub's dataset; None: the place is a file or a directory.
    """

    place: Path | str
    column: str
    split: str | None = None

    def __str__(self) -> str:
        return f"{self.place}, column {self.column!r}"

    def texts(self) -> Iterator[str]:
        """The rows; one that is null is empty.

        Raises:
            AnalyzeError: There is no such column of text, or no whole table.
            ModuleNotFoundError: A library is missing.
            OSError: A file cannot be read.
        """
        arrow = optional("pyarrow", "a table", _INSTALL)
        try:
            for found in self._batches(arrow):
                kind = found.schema.field(self.column).type
                if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                    raise AnalyzeError(f"{self} must be text, got {kind}")
                yield from (text or "" for text in found.column(self.column).to_pylist())
        except arrow.ArrowInvalid as error:
            cause = str(error).splitlines()[0]
            raise AnalyzeError(f"{self.place} is no whole table: {cause}") from error

    def _batches(self, arrow: Any) -> Iterator[Any]:
        """Tables or batches that have the column."""
        if self.split is not None:
            yield from self._of_hub()
            return
        for path in _files_of(Path(self.place)):
            if path.suffix == ".parquet":
                parquet = optional("pyarrow.parquet", "a table", _INSTALL)
                with parquet.ParquetFile(path) as file:
                    self._check(file.schema_arrow.names)
                    yield from file.iter_batches(_ROWS, columns=[self.column])
            else:
                with arrow.memory_map(str(path)) as file, _arrow_reader(arrow, file) as reader:
                    self._check(reader.schema.names)
                    yield from _record_batches(reader)

    def _of_hub(self) -> Iterator[Any]:
        datasets = optional("datasets", "--dataset", "datasets")
        name, _, configuration = str(self.place).partition(":")
        with doing(f"cannot load the dataset {self.place}"):
            found = datasets.load_dataset(name, configuration or None, split=self.split)
        self._check(found.column_names)
        yield from found.select_columns([self.column]).with_format("arrow").iter(_ROWS)

    def _check(self, columns: list[str]) -> None:
        if columns.count(self.column) != 1:
            raise AnalyzeError(
                f"{self.place} must have one column {self.column!r}, got {', '.join(columns)}"
            )


def is_table(path: Path) -> bool:
    """Whether a path is to be read as a table, not as text."""
    return path.suffix in _SUFFIXES or path.is_dir()


def _files_of(place: Path) -> list[Path]:
    """The files of a table, in order."""
    if not place.is_dir():
        return [place]
    state = place / "state.json"
    if state.is_file():  # of Dataset.save_to_disk
        try:
            files = [
                place / entry["filename"]
                for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise AnalyzeError(f"{state} is no state of a saved dataset") from error
        if list(place.glob("indices*.arrow")):
            raise AnalyzeError(
                f"{place} was saved with a selection of its rows: save dataset.flatten_indices()"
            )
        return files
    if (place / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in place.iterdir() if path.is_dir())
        raise AnalyzeError(f"{place} holds several splits: name one, {', '.join(splits)}")
    files = sorted(path for path in place.iterdir() if path.suffix in _SUFFIXES)
    if len(kinds := {path.suffix for path in files}) != 1:
        found = " and ".join(sorted(kinds)) or "none"
        raise AnalyzeError(f"{place} must hold .parquet files or .arrow files, got {found}")
    return files


def _arrow_reader(arrow: Any, file: Any) -> Any:
    """A reader of the file format, or of the stream format that datasets writes."""
    try:
        return arrow.ipc.open_file(file)
    except arrow.ArrowInvalid:
        file.seek(0)
        return arrow.ipc.open_stream(file)


def _record_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        return (reader.get_batch(i) for i in range(reader.num_record_batches))
    return iter(reader)
