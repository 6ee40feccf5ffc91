"""Maps in a .json file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ikattn.maps.files._common import DTYPES, MapFileError


class JsonSink:
    """One document; numbers with as many digits as it takes to read the same ones back."""

    def __init__(self, file: BinaryIO, path: Path, stack: ExitStack) -> None:
        self._file = file
        self._file.write(b'{"arrays": {')
        self._first = True

    def add(self, name: str, tensor: Tensor) -> None:
        kind = str(tensor.dtype).removeprefix("torch.")
        start = "" if self._first else ","
        head = {"dtype": kind, "shape": list(tensor.shape)}
        self._file.write(f"{start}\n{json.dumps(name)}: {json.dumps(head)[:-1]}, ".encode())
        self._file.write(b'"values": ')
        self._first = False
        text = _number_writer(tensor.dtype)
        self._nest(tensor.tolist(), text)
        self._file.write(b"}")

    def _nest(self, values: Any, text: Callable[[Any], str]) -> None:
        """Rows become text at once, what holds them piece by piece."""
        if not isinstance(values, list):
            self._file.write(text(values).encode())
        elif not values or not isinstance(values[0], list):
            self._file.write(f"[{', '.join(map(text, values))}]".encode())
        else:
            for index, part in enumerate(values):
                self._file.write(b"[" if index == 0 else b", ")
                self._nest(part, text)
            self._file.write(b"]")

    def finish(self, metadata: dict[str, Any]) -> None:
        self._file.write(f'}},\n"metadata": {json.dumps(metadata)}}}\n'.encode())


def _number_writer(dtype: torch.dtype) -> Callable[[Any], str]:
    if dtype == torch.bool or not dtype.is_floating_point:
        return json.dumps
    digits = 17 if dtype == torch.float64 else 9

    def text(number: float) -> str:
        if number == 0:
            return str(number)  # -0.0 keeps its sign, -0 would not
        # JSON has no word for NaN and infinity; as text they are read back all the same.
        return f"{number:.{digits}g}" if math.isfinite(number) else f'"{number}"'

    return text


def read_json(path: Path) -> tuple[str | None, dict[str, Tensor]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MapFileError(path, f"it is cut short or no JSON ({error})") from error
    if not isinstance(document, dict) or "metadata" not in document or "arrays" not in document:
        return None, {}
    try:
        arrays = {
            name: torch.tensor(
                _numbers(entry["values"]), dtype=DTYPES[entry["dtype"]], device="cpu"
            ).reshape(entry["shape"])
            for name, entry in document["arrays"].items()
        }
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise MapFileError(path, f"its arrays are damaged ({error})") from error
    return json.dumps(document["metadata"]), arrays


def _numbers(values: Any) -> Any:
    if isinstance(values, list):
        return [_numbers(part) for part in values]
    return float(values) if isinstance(values, str) else values
