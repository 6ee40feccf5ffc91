"""Time and memory of a training step of long_sequences.py, beside softmax attention's."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import ikattn
from comparison import Table
from long_tasks import Lists
from long_training import Plan, Setting, Training, build_model
from sequence_models import Block, Kernel

NO_ATTENTION = "no attention"  # the value takes the place of what attention gives: the rest's time


class Cost(NamedTuple):
    """The cost of a step with one sequence of ListOps.

    ``times_softmax`` is the step's time over that of softmax attention, of samples in turns;
    ``attention_share`` what of the step would go without attention; ``forward`` and ``backward``
    are the algorithms that ran.
    """

    heads: int
    length: int
    attention: str
    milliseconds: float
    times_softmax: float
    attention_share: float
    mebibytes: float  # at the peak above those before the first step
    forward: str
    backward: str


def value_alone(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """A stand-in for attention, to measure the rest of a step."""
    return v


def prepare(attention: str, kernel: Kernel, heads: int, length: int) -> Callable[[], None]:
    """A step to be measured, with its model and a batch of one sequence."""
    task = Lists()
    setting = Setting(kernel, heads)
    torch.manual_seed(0)
    model = build_model(task, setting)
    if attention == NO_ATTENTION:
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attention._attend = value_alone  # type: ignore[method-assign]
    step = Training(model, Plan((length,), length, 100, 1e-3, 2), setting)
    batch = task.draw(1, length, np.random.default_rng(0))
    return lambda: step(batch)


def algorithms(kernel: Kernel, heads: int, length: int, size: int) -> tuple[str, str]:
    """Returns the algorithm of each pass: "linear" or "quadratic"; "-" for softmax."""
    if kernel.kind != "implicit":
        return "-", "-"
    dim = size // heads
    q = torch.randn(1, heads, length, dim + 1, requires_grad=True)  # with the place
    v = torch.randn(1, heads, length, dim, requires_grad=True)
    w = torch.randn(heads, dim + 1, kernel.frequencies, requires_grad=True)
    kernels = ikattn.which_kernels(q, q, v, w, w, p=None)
    return kernels.forward.algorithm, kernels.backward.algorithm


def peak_of(attention: str, heads: int, length: int, threads: int) -> float:
    """MiB at the peak of a step above those before it, in a process of its own."""
    program = Path(__file__).parent / "long_sequences.py"
    command = [sys.executable, str(program), "--peak-of", attention, str(heads), str(length)]
    result = subprocess.run(
        [*command, "--threads", str(threads)], capture_output=True, text=True, check=True
    )
    return float(result.stdout)


def resident(field: str) -> float:
    """MiB that this process holds ("VmRSS") or held at its peak ("VmHWM"), as Linux tells it.

    The peak of getrusage would not do: a process begins with that of the one that started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def print_peak_of(kernel: Kernel, options: argparse.Namespace) -> None:
    """Prints what ``peak_of`` reads."""
    attention, heads, length = options.peak_of
    warm = prepare(attention, kernel, int(heads), 64)  # what libraries set up once does not count
    warm()
    step = prepare(attention, kernel, int(heads), int(length))
    before = resident("VmRSS")
    step()
    print(max(0.0, resident("VmHWM") - before))


def measure_costs(
    kernels: dict[str, Kernel],
    shapes: list[tuple[int, int]],
    samples: int,
    size: int,
    options: argparse.Namespace,
) -> None:
    """Measures every attention at each number of heads and length, and prints a table.

    Args:
        kernels: By name; softmax is the first.
        shapes: Heads and length.
        samples: Of each step; the best counts.
        size: D of the model.
        options: ``csv`` and ``threads``.
    """
    table = Table[Cost](options.csv)
    print("ms a step of one sequence (best of samples in turns), over softmax's, attention's share")
    for heads, length in shapes:
        every = {**kernels, NO_ATTENTION: Kernel("softmax")}
        steps = {name: prepare(name, kernel, heads, length) for name, kernel in every.items()}
        best = dict.fromkeys(every, float("inf"))
        for sample in range(samples + 1):
            for name, step in steps.items():
                start = time.process_time()
                step()
                if sample > 0:  # the first warms up
                    best[name] = min(best[name], time.process_time() - start)
        softmax, rest = best[next(iter(kernels))], best[NO_ATTENTION]
        for name, seconds in best.items():
            peak = peak_of(name, heads, length, options.threads)
            cost = Cost(
                heads,
                length,
                name,
                round(1e3 * seconds, 1),
                round(seconds / softmax, 3),
                round(1 - rest / seconds, 3),
                round(peak, 1),
                *algorithms(every[name], heads, length, size),
            )
            table.add(cost)
            print(
                f"{heads} heads, N = {length:<6}{name:<14}{cost.milliseconds:9.1f} ms"
                f"{cost.times_softmax:8.2f}{100 * cost.attention_share:7.0f} %"
                f"{cost.mebibytes:8.0f} MiB  {cost.forward}, {cost.backward}",
                flush=True,
            )
