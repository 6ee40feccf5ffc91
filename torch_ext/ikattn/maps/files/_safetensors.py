"""Maps in a .safetensors file."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor

from ikattn._optional import optional
from ikattn.maps.files._common import SAFETENSORS_TYPES, MapFileError, raw_bytes

_MAX_HEADER = 100_000_000  # the safetensors library reads no longer one


class SafetensorsSink:
    """Arrays wait in files without a name, one for each item size; the header has to come first.

    Larger items first is what keeps every array aligned: the format allows no gaps.
    """

    def __init__(self, file: BinaryIO, path: Path, stack: ExitStack) -> None:
        self._file, self._path, self._stack = file, path, stack
        self._waiting: dict[int, IO[bytes]] = {}
        self._arrays: dict[int, list[tuple[str, str, list[int], int]]]
        self._arrays = {size: [] for size in (8, 4, 2, 1)}

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.element_size()
        if size not in self._waiting:
            waiting = tempfile.TemporaryFile(dir=self._path.resolve().parent)  # noqa: SIM115
            self._waiting[size] = self._stack.enter_context(waiting)
        tensor = tensor.contiguous()
        entry = (name, SAFETENSORS_TYPES[tensor.dtype], list(tensor.shape), tensor.nbytes)
        self._arrays[size].append(entry)
        self._waiting[size].write(raw_bytes(tensor))

    def finish(self, metadata: dict[str, Any]) -> None:
        header: dict[str, Any] = {"__metadata__": {"ikattn": json.dumps(metadata)}}
        offset = 0
        for entries in self._arrays.values():
            for name, kind, shape, size in entries:
                offsets = [offset, offset + size]
                header[name] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
                offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MAX_HEADER:
            raise ValueError(
                f"{self._path} would need a header of {len(text)} bytes, and safetensors allows "
                f"{_MAX_HEADER}: write .npz, or several files"
            )
        self._file.write(len(text).to_bytes(8, "little") + text)
        for size in self._arrays:
            if waiting := self._waiting.get(size):
                waiting.seek(0)
                shutil.copyfileobj(waiting, self._file, 1 << 20)


def read_safetensors(path: Path) -> tuple[str | None, dict[str, Tensor]]:
    safetensors = optional("safetensors", "reading .safetensors", "safetensors")
    try:
        # before 0.6 tensors would come on the default device, whatever it is
        with torch.device("cpu"), safetensors.safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get("ikattn")
            if text is None:  # it may be a model of any size
                return None, {}
            return text, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise MapFileError(path, f"it is cut short or no safetensors file ({error})") from error
