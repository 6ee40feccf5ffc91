"""A call of attention whose tokens two processes share: this one, and a partner that it forks."""

from __future__ import annotations

import atexit
import functools
import math
import multiprocessing
import os
import shutil
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from fuzz.attention import AttentionCall

CHUNKS = 4  # of two ranks in a zigzag
AXES = {"query": 2, "key": 2, "value": 2, "key_bias": -1}


def on_two_ranks(call: AttentionCall, wanted: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the output and gradients, joined."""
    layout = _layout(call)
    partner = _partner()
    partner.send((call, wanted))
    parts = [_part(call, wanted, 0), partner.recv()]
    if isinstance(parts[1], str):
        raise RuntimeError(f"on the second rank: {parts[1]}")
    (output, *gradients) = zip(*parts, strict=True)
    joined = {}
    for name, each in zip(wanted, gradients, strict=True):
        axis, length = AXES.get(name), call.L if name == "query" else call.S
        whole = sum(each) if axis is None else layout.unshard(list(each), axis)
        joined[name] = whole if axis is None else whole.narrow(axis, 0, length)
    return layout.unshard(list(output), 2)[:, :, : call.L], joined


def _part(call: AttentionCall, wanted: list[str], rank: int) -> list[Tensor]:
    """Attends for one rank. Tokens that fill up its chunks are hidden."""
    from ikattn.parallel import context_parallel_attention

    layout, given = _layout(call), call.arguments()
    bias = given["key_bias"]
    bias = torch.zeros(1, dtype=given["w1"].dtype) if bias is None else bias
    given["key_bias"] = bias.expand(*(bias.shape[:-1] if bias.dim() > 1 else (1,)), call.S)
    for name, axis in AXES.items():
        x = given[name]
        more = list(x.shape)
        more[axis] = -x.shape[axis] % CHUNKS
        x = torch.cat([x, x.new_full(more, -math.inf if name == "key_bias" else 0.0)], axis)
        given[name] = layout.shard(x, axis % x.dim(), rank).detach()
    for name in wanted:
        given[name] = given[name].detach().requires_grad_()
    output = context_parallel_attention(**given, layout=layout.name)
    incoming = call.incoming()
    more = [*incoming.shape[:2], -call.L % CHUNKS, call.d_v]
    incoming = layout.shard(torch.cat([incoming, incoming.new_zeros(more)], 2), 2, rank)
    leaves = [given[x] for x in wanted]
    return [output.detach(), *(torch.autograd.grad(output, leaves, incoming) if leaves else [])]


def _layout(call: AttentionCall) -> Any:
    from ikattn.parallel._layout import Layout

    return Layout("zigzag" if call.seed % 2 else "contiguous", 2)


@functools.cache
def _partner() -> Connection:
    folder, (ours, theirs) = tempfile.mkdtemp(), multiprocessing.Pipe()
    if os.fork() == 0:
        ours.close()
        try:
            _serve(theirs, folder)
        finally:
            os._exit(0)
    theirs.close()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _join(folder, 0)
    return ours


def _serve(calls: Connection, folder: str) -> None:
    """Computes the second rank's parts, until nobody asks any more."""
    _join(folder, 1)
    while True:
        call, wanted = calls.recv()
        try:
            with call.modes():
                part: Any = _part(call, wanted, 1)
        except Exception as error:
            part = f"{type(error).__name__}: {error}"
        calls.send(part)


def _join(folder: str, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
