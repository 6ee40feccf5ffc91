"""Maps on their way from a GPU to the CPU, while the model goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Memory that the system cannot move elsewhere: what a recording keeps beyond this is copied as it
# comes, and the host waits for it.
MOST_PAGE_LOCKED = 2 << 30


class Arrival:
    """When copies that have been begun will be there; without copies, at once."""

    def __init__(self, streams: list[Any]) -> None:
        self._events = [stream.record_event() for stream in streams]

    def is_over(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


class Transfers:
    """Copies to the CPU, on streams of their own, into page-locked memory.

    Tensors elsewhere than on CUDA, and those of a graph of autograd, are copied at once.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._kept_bytes = 0

    def to_cpu(self, x: Tensor, *, is_kept: bool) -> Tensor:
        """A copy of ``x`` that is filled when an :meth:`arrival` asked for later is over.

        One that the recording keeps counts towards ``MOST_PAGE_LOCKED``.
        """
        size = x.numel() * x.element_size()
        fits = not is_kept or self._kept_bytes + size <= MOST_PAGE_LOCKED
        if not x.is_cuda or x.requires_grad or x.layout != torch.strided or not fits:
            return x.cpu()
        stream = self._streams.get(x.device)
        if stream is None:
            stream = self._streams[x.device] = torch.cuda.Stream(x.device)
        try:
            copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        except RuntimeError:  # the system has no such memory left
            return x.cpu()
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream), torch.no_grad():
            copy.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory is in use until then
        self._kept_bytes += size if is_kept else 0
        return copy

    def arrival(self) -> Arrival:
        """When all copies will be there that have been begun so far."""
        return Arrival(list(self._streams.values()))
