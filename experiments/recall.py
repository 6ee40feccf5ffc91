"""Recall by attention: how many pairs a model can keep, and what its state takes.

Multi-query associative recall (Arora et al. 2023), generated, without data. Two causal layers with
heads of size 64, whose queries, keys and values pass a convolution over three tokens. Models
are trained on short sequences first, of which the best rates are chosen on a validation set, then
on a mixture up to 512 tokens. They are tested on each length and number of pairs by itself, on
longer sequences, too.

Models are compared after equally many steps, and after the time that softmax attention takes for
these. State is what a layer keeps of the tokens before, in numbers.

    pip install 'ikattn[demo]'
    python experiments/recall.py --quick
    python experiments/recall.py --csv recall.csv --plot recall.png
    python experiments/recall.py --stages 1 --sizes 64 --attention implicit-32 --kernel-rates .1 1
    python experiments/recall.py --random
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from command_line import add_options, check_options, parser_of, run_program
from comparison import Divergences, Table, spread
from recall_protocol import (
    HEAD_DIM,
    LENGTHS,
    PAIRS,
    Moment,
    Run,
    Setting,
    Stage,
    Task,
    fit,
    fitting,
    random_recall,
    seconds_per_step,
)
from sequence_models import Kernel

FREQUENCIES = (8, 16, 32, 64)
# name -> attention; linear ones of more features have the state of 8, 16 and 32 frequencies
ATTENTIONS = {
    "softmax": Kernel("softmax"),
    **{f"implicit-{m}": Kernel("implicit", m) for m in FREQUENCIES},
    **{f"implicit-{m}-none": Kernel("implicit", m, "none") for m in FREQUENCIES},
    **{f"implicit-{m}-forget": Kernel("implicit", m, "none", forget=True) for m in FREQUENCIES},
    "rbf": Kernel("rbf"),
    "elu": Kernel("elu"),
    "elu-528": Kernel("elu", features=528),
    "taylor": Kernel("taylor"),
    "taylor-31": Kernel("taylor", features=31),
    "taylor-63": Kernel("taylor", features=63),
    "delta": Kernel("delta"),
    "delta-512": Kernel("delta", features=512),
}
# what differs in the size of its state alone -> how the plot draws it
FAMILIES = {
    "softmax": "ks",
    "rbf": "kd",
    "implicit, learned p": "o-",
    "implicit, no magnitude": "o--",
    "implicit, gates": "o:",
    "elu + 1": "^-",
    "taylor": "v-",
    "delta": "x-",
}
RATES, KERNEL_RATES = [3e-3, 1e-2], [0.01, 0.1]
STAGES = (Stage((64,), 2048, 400), Stage((64, 128, 256, 512), 2048, 300))
QUICK = (Stage((64,), 256, 2), Stage((64, 128), 256, 1))
MOST_STEPS = 1.5  # times the steps of the stages, where softmax's time is longer than these
SHOWN = [(512, 32), (512, 64), (1024, 64)]  # length and pairs, of the table and the plot


def family_of(name: str) -> str:
    """The line of the plot that an attention belongs to."""
    if name.endswith("forget"):
        return "implicit, gates"
    if name.startswith("implicit"):
        return "implicit, no magnitude" if name.endswith("none") else "implicit, learned p"
    kind = name.partition("-")[0]
    return "elu + 1" if kind == "elu" else kind


def candidates_of(name: str, size: int, options: argparse.Namespace) -> list[Setting]:
    """Settings of an attention to try, with seed 0."""
    kernel = ATTENTIONS[name]
    has_frequencies = kernel.kind == "implicit"
    return [
        Setting(name, kernel._replace(width=width), size, rate, kernel_rate, 0)
        for rate in options.rates
        for width in (options.widths if has_frequencies else [1.0])
        for kernel_rate in (options.kernel_rates if has_frequencies else [1.0])
    ]


def moments_of(
    steps: int, seconds: float, of_softmax: float | None, tasks: list[Task], shown: list[Task]
) -> list[Moment]:
    """After so many steps on all tasks, and after softmax's time for these on those shown."""
    moments = [Moment("equal steps", steps, tasks)]
    if of_softmax is not None:
        in_time = min(max(1, round(steps * of_softmax / seconds)), int(MOST_STEPS * steps))
        moments.append(Moment("equal time", in_time, shown))
    return moments


def mean_of(runs: Sequence[Run], moment: str, task: Task) -> str:
    """Mean and deviation of the accuracies, in percent; "" where there are none."""
    found = [
        100 * run.accuracy
        for run in runs
        if run.moment == moment and (run.length, run.pairs) == task
    ]
    return spread(found, 1) if found else ""


def print_row(label: str, runs: Sequence[Run], shown: Sequence[Task]) -> None:
    state = next(run.state for run in runs if run.length == shown[0][0])
    row = f"{label:<44}{state:9}{1e3 * runs[0].seconds_per_step:8.0f}"
    for moment in ("equal steps", "equal time"):
        row += "  " + "".join(f"{mean_of(runs, moment, task):>12}" for task in shown)
    print(row, flush=True)


def print_tried(runs: Sequence[Run]) -> None:
    """The candidates of one attention and their validation, where there were several."""
    tried: dict[tuple[float, ...], list[float]] = {}
    for run in runs:
        if run.moment == "validation":
            found = tried.setdefault((run.rate, run.width, run.kernel_rate), [])
            found.append(100 * run.accuracy)
    for (rate, width, kernel_rate), found in tried.items() if len(tried) > 1 else ():
        options = f"rate {rate:g}, width {width:g}, kernels x {kernel_rate:g}"
        print(f"    {options:<40}validation {spread(found, 1)}", flush=True)


def draw_recall(path: Path, runs: Sequence[Run], tasks: Sequence[Task]) -> None:
    """Draws accuracy after equal steps against the size of the state, a panel for each task."""
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys(run.size for run in runs))
    figure, panels = plt.subplots(
        len(sizes),
        len(tasks),
        figsize=(4.5 * len(tasks), 3.6 * len(sizes)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for row, size in zip(panels, sizes, strict=True):
        for axes, task in zip(row, tasks, strict=True):
            own = [
                run
                for run in runs
                if (run.size, run.moment) == (size, "equal steps")
                and (run.length, run.pairs) == task
            ]
            _draw_families(axes, own)
            axes.set(title=f"width {size}: {task[1]} pairs in {task[0]} tokens", xscale="log")
            axes.set(xlabel="numbers that a layer keeps", ylim=(-3, 103))
        row[0].set_ylabel("answers that are right, %")
    panels[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_families(axes: Any, runs: Sequence[Run]) -> None:
    """One line for the attentions that differ in the size of their state alone."""
    for family, marker in FAMILIES.items():
        names = [name for name in ATTENTIONS if family_of(name) == family]
        points = []
        for name in names:
            found = [run for run in runs if run.attention == name]
            if found:
                accuracy = 100 * np.mean([run.accuracy for run in found])
                points.append((found[0].state, accuracy))
        points.sort()
        if points:
            axes.plot(*zip(*points, strict=True), marker, label=family)


def print_random() -> None:
    """Measures a kernel's room by random keys, at the best of three widths."""
    counts = (16, 32, 64, 128, 256, 512, 1024, 2048)
    print("% of values that a kernel with random frequencies recalls, by number of tokens")
    print(f"{'M':>3}{'entries':>9}" + "".join(f"{count:6}" for count in counts))
    for m in (4, *FREQUENCIES):
        row = f"{m:3}{m * (2 * m + 1) + 1:9}"
        for count in counts:
            row += f"{100 * max(random_recall(m, count, width) for width in (2, 3, 5)):6.0f}"
        print(row, flush=True)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    add("--sizes", nargs="+", type=int, default=[64, 128], help="of the model; default: 64 128")
    add("--seeds", type=int, default=1)
    add("--stages", type=int, default=len(STAGES), help="of training; 1: short sequences alone")
    add("--rates", nargs="+", type=float, default=RATES, help="of Adam")
    add("--widths", nargs="+", type=float, default=[1.0], help="of first frequencies; 0: paper's")
    add("--kernel-rates", nargs="+", type=float, default=KERNEL_RATES, help="times the rate")
    add("--quick", action="store_true", help="width 64, three steps, up to 128 tokens")
    add("--random", action="store_true", help="print what random keys tell instead")
    add_options(parser, plotted="accuracies against the size of the state")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.seeds = [64], 1
    check_options(parser, options, ["seeds", "stages", "threads"])
    if any(size < HEAD_DIM or size % HEAD_DIM for size in options.sizes):
        parser.error(f"--sizes must be multiples of {HEAD_DIM}, got {options.sizes}")
    if min(options.rates) <= 0 or min(*options.widths, *options.kernel_rates) < 0:
        parser.error("--rates must be above 0, --widths and --kernel-rates at least 0")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.random:
        print_random()
        return
    stages = (QUICK if options.quick else STAGES)[: options.stages]
    lengths = [n for n in LENGTHS if not options.quick or n <= 128]
    tasks = [(length, pairs) for length in lengths for pairs in fitting(PAIRS, length)]
    shown = [(128, 32)] if options.quick else SHOWN
    steps = sum(stage.steps for stage in stages)
    told = "; ".join(f"{pairs} pairs in {length} tokens" for length, pairs in shown)
    print(f"State of the first task; ms per step; accuracy in % of {told}:")
    print("after equal steps, then after softmax's time")
    table = Table[Run](options.csv)
    divergences = Divergences()
    for size in options.sizes:
        candidates = [candidates_of(name, size, options) for name in options.attention]
        firsts = [tried[0] for tried in candidates]
        seconds = seconds_per_step(firsts, stages[-1], 1 if options.quick else 3)
        times = dict(zip(options.attention, seconds, strict=True))
        for tried, per_step in zip(candidates, seconds, strict=True):
            moments = moments_of(steps, per_step, times.get("softmax"), tasks, shown)
            label, rows = f"{size}, {tried[0].kernel}", []
            for seed in tqdm(range(options.seeds), desc=label, leave=False, disable=None):
                seeded = [setting._replace(seed=seed) for setting in tried]
                arguments = (seeded, stages, moments, per_step, shown[0])
                found = divergences.fit(f"{label}, seed {seed}", partial(fit, *arguments)) or []
                table.add(*found)
                rows += found
            if rows:
                print_row(label, rows, shown)
                print_tried(rows)
    if options.plot is not None and table.runs:
        draw_recall(options.plot, table.runs, shown)
    divergences.end()


if __name__ == "__main__":
    run_program(main)
