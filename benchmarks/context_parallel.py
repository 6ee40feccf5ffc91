"""Traffic of ranks that share a sequence, and their speed over that of one, over gloo.

    python benchmarks/context_parallel.py [--length 65536] [--frequencies 16] [--processes 1 2 4]

Each process has one thread. A wrapper of the process group counts the bytes that a rank hands to
it; an all-reduce of n bytes over W ranks counts as the 2 (W - 1) / W n of a ring. Times are of the
slowest rank, medians of rounds; the attention of one process is the operator itself. With --paper
nothing runs: the bytes and times of docs/internals/parallel.md are computed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ikattn
from ikattn.parallel import context_parallel_attention


class Counting(dist.ProcessGroup):
    """A group over gloo that counts what this rank sends."""

    sent = 0

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.inner = inner

    def getBackendName(self) -> str:
        return "counting"

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        Counting.sent += sum(x.nbytes for x in tensors)
        return self.inner.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> Any:
        return self.inner.recv(tensors, of, tag)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        share = 2 * (self.size() - 1) / self.size()
        Counting.sent += int(share * sum(x.nbytes for x in tensors))
        return self.inner.allreduce(tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self.inner.barrier(opts)


def _make(store: Any, rank: int, size: int, timeout: Any) -> Counting:
    inner = dist.ProcessGroupGloo(store, rank, size, timeout)
    return Counting(inner, rank, size)


def program(rank: int, size: int, given: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.Backend.register_backend("counting", _make, devices=["cpu"])
    dist.init_process_group(
        "counting", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size
    )
    torch.manual_seed(rank)
    shape = (1, given.heads, given.length // size, given.size)
    leaves = [torch.randn(shape).requires_grad_() for _ in range(3)]
    torch.manual_seed(0)
    frequencies = [
        (0.1 * torch.randn(given.heads, given.size, given.frequencies)).requires_grad_()
        for _ in range(2)
    ]
    lines = []
    for algorithm, is_causal in given.ways:
        times, both = [], []
        for _ in range(given.rounds + 1):
            for keeps in (False, True):
                dist.barrier()
                Counting.sent, begin = 0, time.perf_counter()
                with torch.set_grad_enabled(keeps):
                    output = attend(given, size, algorithm, is_causal, leaves, frequencies)
                    forward = Counting.sent
                    if keeps:
                        output.sum().backward()
                dist.barrier()
                (both if keeps else times).append(time.perf_counter() - begin)
        seconds, whole = statistics.median(times[1:]), statistics.median(both[1:])
        lines.append(f"{algorithm} {is_causal} {seconds} {whole} {forward} {Counting.sent}")
    if rank == 0:
        Path(folder, f"of{size}").write_text("\n".join(lines))
    dist.destroy_process_group()


def attend(
    given: argparse.Namespace,
    size: int,
    algorithm: Any,
    is_causal: bool,
    tokens: list[Tensor],
    frequencies: list[Tensor],
) -> Tensor:
    if size == 1:
        return ikattn.implicit_kernel_attention(*tokens, *frequencies, is_causal=is_causal)
    best = "zigzag" if is_causal and algorithm == "quadratic" else "contiguous"
    layout: Any = given.layout or best
    return context_parallel_attention(
        *tokens, *frequencies, is_causal=is_causal, algorithm=algorithm, layout=layout
    )


def sent_on_paper(
    way: str, ranks: int, length: int, heads: int, size: int, frequencies: int, element: int
) -> tuple[float, float]:
    """Bytes that a rank hands on, forward and backward; d = d_v, heads not grouped."""
    if ranks == 1:
        return 0.0, 0.0
    features = 2 * frequencies
    moments = 4.0 * heads * (features * (features + 1) // 2 + 1) * (size + 1) + 8 * heads
    tokens = 2.0 * heads * length / ranks * size  # numbers in keys and values of a rank
    if way == "ring":
        # keys and values once more, and their gradients in float32 all the way round
        back = (ranks - 1) * tokens * element + ranks * tokens * 4
        return (ranks - 1) * tokens * element, back
    if way == "all-reduce":
        return 2 * (ranks - 1) / ranks * moments, 2 * (ranks - 1) / ranks * moments
    return moments, moments - 8 * heads  # scan; gradients have no references


PAIRS = 2.5e12  # pairs a second and GPU, forward, of heads of 64 with 64 frequencies (an H200)
LINKS = {"NVLink": 450e9, "network": 50e9}  # bytes a second one way


def paper() -> None:
    """Prints the traffic and work of a GPU in a forward pass of 16 bits, 8 heads of 64."""
    heads, size, element = 8, 64, 2
    print("| GPUs | tokens | M | way | MB sent | ms NVLink | ms network | ms of pairs |")
    for ranks in (8, 64, 512):
        for length in (65536, 1048576):
            pairs = 1e3 * heads * length * length / ranks / PAIRS
            for frequencies, way in (
                (64, "ring"),
                (16, "all-reduce"),
                (64, "all-reduce"),
                (16, "scan"),
                (64, "scan"),
            ):
                sent = sent_on_paper(way, ranks, length, heads, size, frequencies, element)[0]
                hops = ranks if way == "scan" else 1  # one after the other
                times = [f"{1e3 * hops * sent / link:.2f}" for link in LINKS.values()]
                told = f"{pairs:.1f}" if way == "ring" else ""
                print(
                    f"| {ranks} | {length} | {'any' if way == 'ring' else frequencies} | {way} "
                    f"| {sent / 1e6:.2f} | {' | '.join(times)} | {told} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=65536, help="of all ranks together")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--frequencies", type=int, default=16)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quadratic", action="store_true", help="the ring, not the sums")
    parser.add_argument("--layout", default=None, choices=["contiguous", "zigzag"])
    parser.add_argument("--paper", action="store_true")
    given = parser.parse_args()
    if given.paper:
        paper()
        return
    algorithm = "quadratic" if given.quadratic else "linear"
    given.ways = [(algorithm, False), (algorithm, True)]
    features = 2 * given.frequencies
    moments = 4 * given.heads * (features * (features + 1) // 2 + 1) * (given.size + 1)
    print(f"moments of all heads: {moments} bytes")
    alone: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in given.processes:
            torch.multiprocessing.spawn(program, (size, given, folder), nprocs=size)
            for line in Path(folder, f"of{size}").read_text().splitlines():
                way, causal, *numbers = line.split()
                forward, whole, sent, sent_whole = map(float, numbers)
                kind = "ring" if given.quadratic else "scan" if causal == "True" else "all-reduce"
                on_paper = sent_on_paper(
                    kind, size, given.length, given.heads, given.size, given.frequencies, 4
                )
                first = alone.setdefault(causal, (forward, whole))
                print(
                    f"{way}, {'causal' if causal == 'True' else 'not causal'}, {size} processes: "
                    f"forward {first[0] / forward:.2f}, with backward {first[1] / whole:.2f} times "
                    f"as fast as the first; sent by rank 0 {sent:.0f} and {sent_whole:.0f} bytes, "
                    f"{sent / moments:.2f} and {sent_whole / moments:.2f} of the moments; on paper "
                    f"{on_paper[0]:.0f} and {sum(on_paper):.0f}"
                )


if __name__ == "__main__":
    main()
