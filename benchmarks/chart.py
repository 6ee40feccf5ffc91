"""Draws README's chart of speed from the tables under results/.

    python benchmarks/chart.py    # writes docs/speed.svg

Each line is one number of frequencies M, forward without a mask: the time of softmax attention
over that of ikattn, by the length N.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLOURS = {16: "#1b9e77", 32: "#d95f02", 64: "#7570b3"}

# Ratios by number of frequencies, then by length.
Ratios = dict[int, dict[int, float]]


def of_processor(text: str) -> Ratios:
    """Reads a table of cpu_table.py: the best of each cell."""
    heads = re.search(r"^\|  \|(.*)\|$", text, re.MULTILINE)
    assert heads is not None, "the table has no row of lengths"
    lengths = [int(cell.strip().removeprefix("N=")) for cell in heads[1].split("|")]
    ratios: Ratios = {}
    for M, row in re.findall(r"^\| forward M=(\d+) / [^|]*\|(.*)\|$", text, re.MULTILINE):
        cells = [cell.split()[0] for cell in row.split("|")]
        ratios[int(M)] = {
            N: float(cell) for N, cell in zip(lengths, cells, strict=True) if cell != "-"
        }
    return ratios


def of_gpu(text: str) -> Ratios:
    """Reads a page of gpu.py: of several algorithms at one length, the faster one."""
    ratios: Ratios = defaultdict(dict)
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        if (width := re.search(r"M = (\d+)", section.splitlines()[0])) is None:
            continue
        found = re.findall(
            r"N = (\d+), bfloat16, forward\n(?:  .*\n)*?  ikattn takes ([\d.]+) of", section
        )
        for N, taken in found:
            of_width = ratios[int(width[1])]
            of_width[int(N)] = max(of_width.get(int(N), 0.0), 1 / float(taken))
    return dict(ratios)


def draw(axes: Axes, ratios: Ratios, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.axhline(1, color="#666666", linewidth=1, linestyle="--")
    for M, by_length in sorted(ratios.items()):
        lengths = sorted(by_length)
        values = [by_length[N] for N in lengths]
        axes.plot(lengths, values, "o-", color=COLOURS[M], markersize=4, label=f"M = {M}")
    longest = sorted({N for by_length in ratios.values() for N in by_length})
    axes.xaxis.set_major_locator(FixedLocator(longest))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda N, _: f"{N:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("N, tokens")
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", type=Path, default=RESULTS / "amd-epyc-zen5.md")
    parser.add_argument("--gpu", type=Path, default=RESULTS / "nvidia-h100.md")
    parser.add_argument("--newer-gpu", type=Path, default=RESULTS / "nvidia-h200.md")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "speed.svg")
    arguments = parser.parse_args()

    # Text stays text, and ids do not change from run to run.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ikattn", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    draw(left, of_processor(arguments.cpu.read_text()), "one core of an AMD EPYC (Zen 5), float32")
    ratios = of_gpu(arguments.gpu.read_text()) | of_gpu(arguments.newer_gpu.read_text())
    draw(right, ratios, "NVIDIA H100, M = 64: H200, bfloat16")
    left.set_ylabel("forward, times as fast as softmax")
    left.legend(frameon=False)
    figure.savefig(arguments.out, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    main()
