"""Numbers of maps inside a page, as two bytes each."""

from __future__ import annotations

import base64
import math
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ikattn.maps.files._common import raw_bytes

_NOT_FINITE = 65535
_NEGATIVE = 32768  # added to the code of a magnitude, in arrays with numbers below 0


class Arrays:
    """Writes arrays into the page and knows how exact they still are."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._count = 0
        self._coarsest = 0.0

    def add(self, tensor: Tensor) -> dict[str, Any]:
        """Writes uint16 codes of numbers, and returns what they stand for.

        A code c is exp(lo + step (c - 1)), 0 for zero; _NEGATIVE more is the same number below 0.
        """
        x = tensor.detach().cpu().double()
        below, finite, x = x < 0, x.isfinite(), x.abs()
        is_signed = bool(below.any())
        positive = finite & (x > 0)
        logs = x.where(positive, x.new_ones(())).log()
        lowest = float(logs[positive].min()) if positive.any() else 0.0
        highest = float(logs[positive].max()) if positive.any() else 0.0
        step = (highest - lowest) / ((_NEGATIVE if is_signed else _NOT_FINITE) - 3)
        codes = ((logs - lowest) / step if step else torch.zeros_like(logs)).round() + 1
        codes = codes.where(positive, codes.new_zeros(())) + _NEGATIVE * below
        codes = codes.where(finite, codes.new_full((), _NOT_FINITE))
        codes = codes.to(torch.int32).to(torch.uint16).contiguous()
        name = f"array-{self._count}"
        self._count += 1
        self._coarsest = max(self._coarsest, step)
        self._file.write(f'<script type="text/plain" id="{name}">'.encode())
        self._file.write(f"{as_base64(codes)}</script>\n".encode())
        return {"id": name, "lo": lowest, "step": step, "signed": is_signed}

    def precision(self) -> str:
        """Returns a sentence on how exact numbers still are."""
        percent = 100 * math.expm1(self._coarsest / 2)
        return (
            f"Numbers in this page are within {max(percent, 0.001):.2g} % of those recorded and "
            "shown with three digits."
        )


def as_base64(tensor: Tensor) -> str:
    """Returns the numbers of a tensor, little-endian, as a page's script decodes them."""
    return base64.b64encode(raw_bytes(tensor)).decode()
