"""Types and errors that the formats of map files share."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

# The types that maps may have, by their names in .safetensors, and in .json.
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_TYPES}


class MapFileError(ValueError):
    """A file that holds no maps, or not all of them, or maps of a later format."""

    def __init__(self, path: str | os.PathLike[str], cause: str) -> None:
        super().__init__(f"{os.fspath(path)}: {cause}")


def raw_bytes(tensor: Tensor) -> memoryview | bytes:
    """The memory of a contiguous CPU tensor; alive as long as the tensor is."""
    if tensor.numel() == 0:
        return b""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
