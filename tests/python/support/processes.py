"""Starts the processes of a test of torch.distributed, and ends them where they hang."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LIMIT = 300.0  # seconds, of all processes
ANSWER = datetime.timedelta(seconds=120)  # in which each rank must come to a collective


def run_processes(program: Callable[[Path], Any], folder: Path, processes: int) -> list[Any]:
    """Runs a program of a module in processes with a gloo group: what it returns in each rank.

    Raises:
        TimeoutError: They have not ended within the limit; they are ended then.
        torch.multiprocessing.ProcessRaisedException: The program of a rank raised.
    """
    arguments = (program, str(folder), processes)
    context = torch.multiprocessing.spawn(_begin, arguments, nprocs=processes, join=False)
    end = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > end:
                raise TimeoutError(f"{program.__name__} has not ended within {LIMIT:.0f} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"{program.__name__}.{rank}.pt") for rank in range(processes)]


def _begin(rank: int, program: Callable[[Path], Any], folder: str, processes: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # which transformers reads
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
    store = f"file://{folder}/{program.__name__}.store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=processes, timeout=ANSWER
    )
    try:
        torch.save(program(Path(folder)), f"{folder}/{program.__name__}.{rank}.pt")
    finally:
        dist.destroy_process_group()


def stacked(E: int, H: int, layers: int = 2, seed: int = 0) -> nn.Module:
    """Makes layers of torch without dropout, whose weights are those of a seed."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def whole(x: Any) -> Tensor:
    """Returns a tensor of which every rank may hold a part, copied."""
    gathered: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return gathered.detach().clone()


def messages_of(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Returns the message of each call, or "no error"."""
    messages = dict.fromkeys(calls, "no error")
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages
