"""The table of CPU measurements: ikattn beside its rivals, as Markdown, with machine and commit.

Every cell is a ratio, time of the rival over that of ikattn, best (median) of samples taken in
turns in one process. B = 1, H = 8, d = 64, float32 and one thread unless the row says otherwise.

    export OMP_WAIT_POLICY=passive
    python benchmarks/cpu_table.py --out benchmarks/results/NAME.md    # some nine minutes
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from contributions import factor_form, five_dimensional
from contributions import inputs as contribution_inputs
from timing import interleaved, peak_memory, processor
from torch import Tensor

import ikattn

LENGTHS = (128, 512, 2048, 4096, 8192)
Call = Callable[[], object]


def inputs(length: int, frequencies: int, dtype: torch.dtype, heads: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    bound = 1 / (heads * frequencies) ** 0.5
    tokens = [torch.randn(1, heads, length, 64, dtype=dtype) for _ in range(3)]
    return tokens + [torch.empty(heads, 64, frequencies).uniform_(-bound, bound) for _ in range(2)]


def forward(function: Callable[..., Tensor], given: list[Tensor], causal: bool) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            return function(*given, is_causal=causal)

    return call


def both(function: Callable[..., Tensor], given: list[Tensor], causal: bool) -> Call:
    leaves = [x.clone().requires_grad_() for x in given]
    gradient = torch.randn_like(given[0])

    def call() -> object:
        return torch.autograd.grad(function(*leaves, is_causal=causal), leaves, gradient)

    return call


def composition(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, is_causal: bool = False
) -> Tensor:
    """Implicit-kernel attention with p = 2 in plain torch, for torch.compile to fuse."""
    assert not is_causal

    def features(x: Tensor) -> Tensor:
        first, second = (2 * math.pi * (x @ w) for w in (w1, w2))
        return torch.cat([first.cos() + second.cos(), first.sin() + second.sin()], dim=-1)

    scores = features(q) @ features(k).transpose(-2, -1) / (4 * w1.shape[-1])
    magnitudes = k.square().sum(-1) / (2 * math.sqrt(k.shape[-1]))
    largest = magnitudes.amax(-1, keepdim=True)
    weights = (scores * scores + 1e-5) * (magnitudes - largest).exp().unsqueeze(-2)
    return weights @ v / weights.sum(-1, keepdim=True)


def ratio(ours: Call, rival: Call, seconds: float) -> str:
    samples = interleaved({"ours": ours, "rival": rival}, seconds)
    best = min(samples["rival"]) / min(samples["ours"])
    median = statistics.median(samples["rival"]) / statistics.median(samples["ours"])
    return f"{best:.2f} ({median:.2f})"


class Row:
    """A row of the table: a name, and what to compare at each length."""

    def __init__(
        self,
        name: str,
        compose: Callable[..., Call],
        rival: Callable[..., Tensor],
        *,
        causal: bool = False,
        frequencies: int = 64,
        dtype: torch.dtype = torch.float32,
        lengths: tuple[int, ...] = LENGTHS,
    ) -> None:
        self.name = name
        self.compose, self.rival, self.causal = compose, rival, causal
        self.frequencies, self.dtype, self.lengths = frequencies, dtype, lengths

    def cell(self, length: int, seconds: float) -> str:
        if length not in self.lengths:
            return "-"
        given = inputs(length, self.frequencies, self.dtype)
        to_rival = given[:3] if self.rival is F.scaled_dot_product_attention else given
        return ratio(
            self.compose(ikattn.implicit_kernel_attention, given, self.causal),
            self.compose(self.rival, to_rival, self.causal),
            seconds,
        )


def rows() -> list[Row]:
    flash, eager = F.scaled_dot_product_attention, ikattn.reference.implicit_kernel_attention
    compiled = torch.compile(composition, dynamic=False)
    half, other_half, some, most = torch.bfloat16, torch.float16, LENGTHS[:3], LENGTHS[:4]
    return [
        Row("forward M=64 / softmax flash", forward, flash),
        Row("forward causal / flash causal", forward, flash, causal=True, lengths=most),
        Row("forward M=32 / flash", forward, flash, frequencies=32),
        Row("forward M=16 / flash", forward, flash, frequencies=16),
        Row("forward / eager composition", forward, eager, lengths=some),
        Row("forward / torch.compile of the eager form", forward, compiled, lengths=most),
        Row("forward + backward M=64 / flash", both, flash),
        Row("forward + backward M=32 / flash", both, flash, frequencies=32),
        Row("forward + backward M=16 / flash", both, flash, frequencies=16),
        Row("forward + backward causal / flash causal", both, flash, causal=True, lengths=most),
        Row("forward + backward / eager composition", both, eager, lengths=some),
        Row("bfloat16 forward / flash bfloat16", forward, flash, dtype=half, lengths=some),
        Row("bfloat16 forward + backward / flash", both, flash, dtype=half, lengths=some),
        Row("float16 forward / flash float16", forward, flash, dtype=other_half, lengths=some),
        Row("float16 forward + backward / flash", both, flash, dtype=other_half, lengths=some),
    ]


def line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def attention(seconds: float) -> list[str]:
    text = [line("", *(f"N={n}" for n in LENGTHS)), "|" + "---|" * (len(LENGTHS) + 1)]
    for row in rows():
        print(row.name, file=sys.stderr)
        text.append(line(row.name, *(row.cell(length, seconds) for length in LENGTHS)))
    return text


def contributions(seconds: float) -> list[str]:
    lengths = (128, 512, 1024, 2048)
    text = [line("N summed, H=12, D=768", *(f"L=S={n}" for n in lengths)), "|" + "---|" * 5]
    rivals = {"factor form in torch": factor_form, "5-D formulation": five_dimensional}
    for name, rival in rivals.items():
        print(name, file=sys.stderr)
        cells = []
        for length in lengths:
            if rival is five_dimensional and length > 512:  # 10 GB at 512
                cells.append("-")
                continue
            given = contribution_inputs(length, 12, 768)

            def ours(given: tuple[Tensor, ...] = given) -> object:
                return ikattn.contributions(*given, maps=["summed"])

            def other(given: tuple[Tensor, ...] = given, rival: Call = rival) -> object:
                return rival(*given)

            with torch.no_grad():
                cells.append(ratio(ours, other, seconds))
        text.append(line(name, *cells))
    return text


def scaling(seconds: float) -> list[str]:
    """Time with one thread over that with two."""
    left = torch.randn(2048, 2048)
    calls: dict[str, Call] = {"torch.mm 2048^3": lambda: left @ left}
    for name, length, heads in (("H=8, N=2048", 2048, 8), ("H=1, N=8192", 8192, 1)):
        given = inputs(length, 64, torch.float32, heads)
        calls[f"forward {name}"] = forward(ikattn.implicit_kernel_attention, given, False)
        calls[f"forward + backward {name}"] = both(ikattn.implicit_kernel_attention, given, False)

    def with_threads(call: Call, threads: int) -> Call:
        def run() -> object:
            torch.set_num_threads(threads)
            return call()

        return run

    text = [line("two threads", "one / two"), "|---|---|"]
    for name, call in calls.items():
        print(name, file=sys.stderr)
        text.append(line(name, ratio(with_threads(call, 2), with_threads(call, 1), seconds)))
    torch.set_num_threads(1)
    return text


SETUP = """
    w1, w2 = (0.1 * torch.randn(8, 64, 64) for _ in range(2))
    few, q = torch.randn(1, 8, 64, 64), torch.randn(1, 8, 2048, 64)
    def run(x, grad):
        x = x.requires_grad_(grad)
        y = ikattn.implicit_kernel_attention(x, x, x, w1, w2)
        return torch.autograd.grad(y, x, y) if grad else y
"""


def memory() -> list[str]:
    text = [line("MiB above the inputs, N=2048", "with outputs"), "|---|---|"]
    for name, grad in (("forward", False), ("forward + backward", True)):
        used = peak_memory(SETUP, f"run(q, {grad})", f"run(few, {grad})")
        text.append(line(name, f"{used:.1f}"))
    return text


def thousand_times(call: Call) -> None:
    for _ in range(1000):
        call()  # not kept: a thousand graphs alive would measure the allocator


def tiny(seconds: float) -> list[str]:
    text = [line("1000 calls on tiny tensors, ms, best", "ikattn", "softmax"), "|---|---|---|"]
    x, w = torch.randn(1, 2, 4, 8), torch.randn(2, 8, 4)
    for grad in (False, True):
        x.requires_grad_(grad)
        rivals: dict[str, Call] = {
            "ikattn": lambda: ikattn.implicit_kernel_attention(x, x, x, w, w),
            "softmax": lambda: F.scaled_dot_product_attention(x, x, x),
        }
        samples = interleaved(
            {name: functools.partial(thousand_times, call) for name, call in rivals.items()},
            seconds,
        )
        best = (f"{1e3 * min(samples[name]):.1f}" for name in rivals)
        text.append(line("with grad" if grad else "without grad", *best))
    return text


def facts() -> list[str]:
    commit = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    described = subprocess.run(commit, capture_output=True, text=True).stdout.strip() or "unknown"
    left = torch.randn(2048, 2048)
    samples = interleaved({"mm": lambda: left @ left}, 2.0)["mm"]
    rate = 2 * 2048**3 / 1e9
    return [
        f"# CPU: {processor()}, {os.cpu_count()} cores, {datetime.date.today()}",
        "",
        "Time of the rival over that of ikattn, best (median) of interleaved samples; above 1",
        "ikattn is faster. B = 1, H = 8, d = 64, float32, one thread unless a row says otherwise.",
        f"Commit {described}, torch {torch.__version__}, "
        f"instruction set {torch.ops.ikattn.instruction_set()},",
        f"products of 16 bits {torch.ops.ikattn.sixteen_bit_instructions()}.",
        f"Probe, torch.mm of 2048^3: {rate / min(samples):.0f} GFLOP/s at best, "
        f"{rate / statistics.median(samples):.0f} in the median.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file; by default the table is printed")
    parser.add_argument("--seconds", type=float, default=3.0, help="per cell")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = [facts(), attention(options.seconds), contributions(options.seconds)]
    parts += [scaling(options.seconds), memory(), tiny(options.seconds)]
    text = "\n\n".join("\n".join(part) for part in parts) + "\n"
    if options.out is None:
        print(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
