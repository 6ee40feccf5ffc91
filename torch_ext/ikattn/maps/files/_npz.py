"""Maps in an .npz file of NumPy."""

from __future__ import annotations

import json
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ikattn._optional import optional
from ikattn.maps.files._common import MapFileError

_METADATA = "metadata.json"


class NumpySink:
    """A ZIP archive of .npy files, stored as they are; its directory comes last, so it streams."""

    def __init__(self, file: BinaryIO, path: Path, stack: ExitStack) -> None:
        self._numpy = optional("numpy", "a .npz file", "numpy")
        self._archive = stack.enter_context(zipfile.ZipFile(file, "w"))
        self._widened: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype == torch.bfloat16:  # which NumPy does not know; float32 holds it exactly
            self._widened[name] = "bfloat16"
            tensor = tensor.float()
        with self._archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
            array = tensor.contiguous().numpy()
            self._numpy.lib.format.write_array(entry, array, allow_pickle=False)

    def finish(self, metadata: dict[str, Any]) -> None:
        self._archive.writestr(_METADATA, json.dumps(metadata | {"widened": self._widened}))


def read_npz(path: Path) -> tuple[bytes | None, dict[str, Tensor]]:
    numpy = optional("numpy", "a .npz file", "numpy")
    arrays: dict[str, Tensor] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            if _METADATA not in archive.namelist():
                return None, {}
            text = archive.read(_METADATA)
            for name in archive.namelist():
                if name != _METADATA:
                    with archive.open(name) as entry:
                        array = numpy.lib.format.read_array(entry, allow_pickle=False)
                        entry.read()  # to the end, where its checksum is compared
                    arrays[name.removesuffix(".npy")] = torch.from_numpy(array)
    except (zipfile.BadZipFile, ValueError, TypeError, EOFError, OSError, RuntimeError) as error:
        raise MapFileError(path, f"it is cut short, damaged or no .npz file ({error})") from error
    try:
        widened = json.loads(text)["widened"]
        for name in widened:
            arrays[name] = arrays[name].to(torch.bfloat16)
    except (KeyError, TypeError, ValueError):
        return None, {}
    return text, arrays
