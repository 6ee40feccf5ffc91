"""Long sequences, by attention: nested lists, texts as bytes, numbers copied and sorted.

A model of two blocks is trained on each task with softmax attention and with the implicit kernel
of M frequencies. It is the same model, but for its attention, and it sees the same sequences.
Seconds are those of the process's CPU in training steps alone.

lists: ListOps (Nangia & Bowman 2018), trees of MIN, MAX, MED and SM over digits, drawn here. Every
list's value is asked, at its closing bracket; tokens tell their level. 500 to 2000 tokens.
texts: sentences of one class of SUBJ, joined to 2000 bytes; subjective or objective?
copy-sort: numbers, asked for as they came or sorted; 128 to 8192 tokens, half of them ask.

--data DIR holds subj.all, for texts; the others need no data.

    pip install 'ikattn[demo]'
    python experiments/long_sequences.py --quick
    python experiments/long_sequences.py --data DIR --csv long.csv --plot long.png
    python experiments/long_sequences.py --tune --csv tuned.csv
    python experiments/long_sequences.py --cost --csv cost.csv
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from command_line import add_options, check_options, parser_of, run_program
from comparison import Divergences, Table
from long_costs import measure_costs, print_peak_of
from long_tasks import SHORTEST_LIST, CopyAndSort, Lists, read_sentences, split_texts
from long_training import SIZE, Plan, Progress, Setting, Task, train
from sequence_models import Kernel

PLANS = {
    "lists": Plan((500, 500, 1000, 2000), 4000, 1500, 4e-3, 100),
    "texts": Plan((500, 1000, 2000), 4000, 240, 4e-3, 160),
    "copy-sort": Plan((128, 256, 512, 1024, 2048, 8192), 4096, 72, 8e-3, 8),
}
FILE = "subj.all"
IMPLICIT_RATE = {"lists": 2.0}  # times the plan's, by --tune; softmax gains nothing by it
COMPARED = ("softmax", "M = 16", "M = 32", "M = 64")  # where --attention is not given
ATTENTIONS = (*COMPARED, "M = 8")
TUNED = Kernel("implicit", p="none")  # --tune: orders differ by less than a point; the fastest
TUNING = Plan((500,), 2000, 250, 4e-3, 200)  # of lists, for every setting
COST_LENGTHS = (2000, 4000, 8000)
COST_SAMPLES = 3


class Run(NamedTuple):
    """One measure of a model on the way or, on test sequences, at the end."""

    task: str
    attention: str
    heads: int
    setting: str  # what is tuned, or "-"
    seed: int
    part: str  # "validation" or "test"
    step: int
    seconds: float  # of training until then
    length: int
    measure: str
    accuracy: float


def kernel_of(attention: str) -> Kernel:
    """The kernel of a name in ATTENTIONS."""
    if not attention.startswith("M = "):
        return Kernel("softmax")
    return TUNED._replace(frequencies=int(attention.removeprefix("M = ")))


def candidates() -> dict[str, Setting]:
    """Settings that --tune tries, by name: one change at a time."""
    softmax, start = Setting(Kernel("softmax")), Setting(Kernel("implicit", p="learned"))
    kernel = start.kernel
    return {
        "softmax": softmax,
        "softmax, rate x 0.5": softmax._replace(learning_rate=0.5),
        "softmax, rate x 2": softmax._replace(learning_rate=2.0),
        "implicit": start,
        "p = none": start._replace(kernel=kernel._replace(p="none")),
        "p = 2": start._replace(kernel=kernel._replace(p="2")),
        "width x 0.5": start._replace(kernel=kernel._replace(width=0.5)),
        "width x 2": start._replace(kernel=kernel._replace(width=2.0)),
        "kernels' rate x 1": start._replace(frequency_rate=1.0),
        "kernels' rate x 0.02": start._replace(frequency_rate=0.02),
        "kernels' gradients x 10": start._replace(gradient_scale=10.0),
        "kernels' gradients x 0.1": start._replace(gradient_scale=0.1),
        "kernels' gradients x 0.01": start._replace(gradient_scale=0.01),
        "rate x 2": start._replace(learning_rate=2.0),
        "reach x 4": start._replace(reach=32.0),
        "rotary places": start._replace(reach=0.0),
    }


def rows_of(
    label: tuple[str, str, int, str, int], progress: Progress, measures: tuple[str, ...]
) -> list[Run]:
    """Rows of the table, one for each measure of the task."""
    where = progress.part, progress.step, round(progress.seconds, 2), progress.length
    return [
        Run(*label, *where, measure, round(accuracy, 4))
        for measure, accuracy in zip(measures, progress.accuracies, strict=True)
    ]


def fit(
    label: tuple[str, str, int, str, int],
    parts: tuple[Task, Task, Task],
    plan: Plan,
    setting: Setting,
    table: Table[Run],
) -> None:
    """Trains a model; what it does on the way is in the table before it goes on."""
    for progress in train(parts, plan, setting, label[-1]):
        table.add(*rows_of(label, progress, parts[0].measures))
    print_row(label, table.runs[-len(parts[0].measures) :])


def print_row(label: tuple[str, str, int, str, int], runs: list[Run]) -> None:
    task, attention, heads, setting, seed = label
    name = attention if setting == "-" else setting
    accuracies = ", ".join(f"{run.measure} {100 * run.accuracy:.1f} %" for run in runs)
    print(
        f"{task:<10}{name:<26}{heads} heads, seed {seed}: {accuracies}, {runs[0].seconds:.0f} s",
        flush=True,
    )


def load_tasks(options: argparse.Namespace) -> dict[str, tuple[Task, Task, Task]]:
    """Sequences of training, validation and test, by task.

    Raises:
        OSError, ValueError: Of texts, the file of sentences is missing or not of its form.
    """
    found: dict[str, tuple[Task, Task, Task]] = {}
    for name in options.tasks:
        if name == "texts":
            training, validation, test = split_texts(read_sentences(options.data, FILE), seed=0)
            found[name] = training, validation, test
        else:
            task = Lists() if name == "lists" else CopyAndSort()
            found[name] = task, task, task
    return found


def draw_curves(path: Path, runs: list[Run]) -> None:
    """Draws accuracy on validation over seconds of training; a panel for each task and measure."""
    import matplotlib.pyplot as plt

    few = Lists.measures[1]  # one a sequence: too few on the way
    runs = [run for run in runs if run.part == "validation" and run.measure != few]
    panels = list(dict.fromkeys((run.task, run.measure) for run in runs))
    figure, grid = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 4), squeeze=False, layout="constrained"
    )
    names = list(dict.fromkeys((run.attention, run.heads) for run in runs))
    for axes, panel in zip(grid[0], panels, strict=True):
        for number, name in enumerate(names):
            own = [r for r in runs if (r.task, r.measure) == panel and r[1:3] == name]
            for seed in dict.fromkeys(run.seed for run in own):
                line = [run for run in own if run.seed == seed]
                first = seed == own[0].seed
                axes.plot(
                    [run.seconds for run in line],
                    [100 * run.accuracy for run in line],
                    color=f"C{number}",
                    marker="o",
                    markersize=3,
                    label=f"{name[0]}, {name[1]} heads" if first else None,
                )
        axes.set(
            title=", ".join(dict.fromkeys(panel)),
            xlabel="seconds of training",
            ylabel="accuracy, %",
        )
    grid[0][0].legend()
    figure.savefig(path, dpi=150)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, help=f"folder of {FILE}, for texts")
    add("--tasks", nargs="+", choices=PLANS, help="default: all; without --data, all but texts")
    add("--attention", nargs="+", choices=ATTENTIONS, default=COMPARED)
    add("--heads", nargs="+", type=int, default=[2], help=f"divisors of {SIZE}; default: 2")
    add("--seeds", type=int, default=1, help="default: 1")
    add("--steps", type=int, help="of training; default: of each task its own")
    add("--tune", action="store_true", help="compare settings on lists of their own, instead")
    add("--settings", nargs="+", choices=candidates(), help="of --tune; default: all")
    add("--cost", action="store_true", help="measure time and memory of a step instead")
    add("--lengths", nargs="+", type=int, default=COST_LENGTHS, help="of --cost, in tokens")
    add("--quick", action="store_true", help="two steps of short sequences, or one sample")
    add("--peak-of", nargs=3, help=argparse.SUPPRESS)
    add_options(parser, plotted="accuracy over training time")
    options = parser.parse_args()
    check_options(parser, options, ["seeds", "steps", "threads"])
    if any(heads < 1 or SIZE % heads for heads in options.heads):
        parser.error(f"--heads must be divisors of {SIZE}, got {options.heads}")
    if min(options.lengths) < SHORTEST_LIST:
        parser.error(f"--lengths must be at least {SHORTEST_LIST}, got {min(options.lengths)}")
    if options.cost and not Path("/proc/self/status").is_file():
        parser.error("--cost reads /proc/self/status, which only Linux has")
    if options.tune and options.cost:
        parser.error("--tune and --cost are two programs")
    if options.plot is not None and (options.tune or options.cost):
        parser.error("--tune and --cost have no plot")
    if options.tasks is None:
        options.tasks = [name for name in PLANS if name != "texts" or options.data is not None]
    if "texts" in options.tasks and options.data is None:
        parser.error(f"--tasks texts needs --data, the folder of {FILE}")
    return options


def shortened(plan: Plan) -> Plan:
    """A plan of --quick."""
    lengths = tuple(length // 8 for length in plan.lengths[:2])
    return plan._replace(lengths=lengths, tokens=128, steps=2, test_sequences=2)


def tune(options: argparse.Namespace) -> None:
    """Trains with each setting for the same steps, on lists that the comparison does not have."""
    table, divergences, task = Table[Run](options.csv), Divergences(), Lists()
    plan = shortened(TUNING) if options.quick else TUNING
    for name, setting in candidates().items():
        if name not in (options.settings or candidates()):
            continue
        for seed in range(options.seeds):
            label = "lists", str(setting.kernel), setting.heads, name, seed
            arguments = (label, (task, task, task), plan, setting, table)
            divergences.fit(f"{name}, seed {seed}", partial(fit, *arguments))
    divergences.end()


def compare(options: argparse.Namespace) -> None:
    """Trains every attention on every task."""
    try:
        tasks = load_tasks(options)
    except (OSError, ValueError) as error:
        sys.exit(f"long_sequences.py: {error}")
    table, divergences = Table[Run](options.csv), Divergences()
    for name, parts in tasks.items():
        plan = PLANS[name]._replace(steps=options.steps or PLANS[name].steps)
        if options.quick:
            plan = shortened(plan)
        for heads in options.heads:
            for attention in options.attention:
                for seed in range(options.seeds):
                    label = name, attention, heads, "-", seed
                    kernel = kernel_of(attention)
                    rate = 1.0 if kernel.kind == "softmax" else IMPLICIT_RATE.get(name, 1.0)
                    setting = Setting(kernel, heads, rate)
                    arguments = (label, parts, plan, setting, table)
                    divergences.fit(", ".join(map(str, label)), partial(fit, *arguments))
    if options.plot is not None and table.runs:
        draw_curves(options.plot, table.runs)
    divergences.end()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        print_peak_of(kernel_of(options.peak_of[0]), options)
    elif options.cost:
        lengths = [64] if options.quick else options.lengths
        shapes = list(product(options.heads, lengths))
        samples = 1 if options.quick else COST_SAMPLES
        kernels = {name: kernel_of(name) for name in COMPARED}
        measure_costs(kernels, shapes, samples, SIZE, options)
    elif options.tune:
        tune(options)
    else:
        compare(options)


if __name__ == "__main__":
    run_program(main)
