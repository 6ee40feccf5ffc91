"""Regression of "Implicit Kernel Attention" (AAAI 2021), by attention and order of the norm.

A transformer of one layer (8 heads of size 8, 64 frequencies) reads a whole data set as one
sequence of inputs x and gives a value y for each. A tenth of the values, drawn at random, is kept
from training and is the test set. Inputs and values are scaled to [-1, 1].

As in the authors' code, the best-epoch error is that of the epoch which does best on the test set:
it is selected on the very data it is measured on. The last-epoch error is not selected.

--data DIR holds airline_passengers/, co2/, concrete/ (each train.csv and test.csv), housing/ and
parkinsons/ (each data.csv.gz, the value in the last column); without headers.

    pip install 'ikattn[demo]'
    python experiments/regression.py --data DIR --quick
    python experiments/regression.py --data DIR --csv regression.csv --plot regression.png
    python experiments/regression.py --data DIR --datasets parkinsons --cost [--csv cost.csv]
"""

from __future__ import annotations

import argparse
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import comparison
from command_line import add_options, check_options, parser_of, run_program
from comparison import (
    GENERATED,
    Divergences,
    Table,
    choose_orders,
    describe,
    draw_plot,
    spread,
)
from regression_protocol import (
    ATTENTIONS,
    DATA_SETS,
    LEARNING_RATE,
    Regressor,
    Run,
    Setting,
    draw_splits,
    fit_repeats,
    load,
    train_epoch,
)

AT_HAND = ["airline", "co2", "housing", "parkinsons"]


def choose_settings(options: argparse.Namespace) -> list[Setting]:
    settings = []
    for data_set in options.datasets:
        for attention in options.attention:
            orders = options.p or [f"{DATA_SETS[data_set].p:g}"]
            settings += [Setting(data_set, attention, p) for p in choose_orders(attention, orders)]
    return settings


def print_row(setting: Setting, runs: list[Run]) -> None:
    row = f"{setting.data_set:<12}{describe(*setting[1:]):<22}"
    for name in ("best_rmse", "last_rmse"):
        row += f"{spread([getattr(run, name) for run in runs], 4):<18}"
    per_epoch = np.mean([run.seconds / run.epochs for run in runs])
    print(f"{row}{1e3 * per_epoch:.0f} ms per epoch", flush=True)


class Cost(NamedTuple):
    data_set: str
    attention: str
    p: str
    seconds_per_epoch: float
    mebibytes: float  # at the peak above those before the first epoch


def measure_cost(options: argparse.Namespace) -> None:
    """Measures time and memory of an epoch of each setting, each in a process of its own."""
    print("seconds per epoch (training), MiB at the peak above those before the first epoch")
    table = Table[Cost](options.csv)
    for setting in choose_settings(options):
        command = [sys.executable, __file__, "--data", str(options.data), "--cost-of", *setting]
        command += ["--threads", str(options.threads), "--seed", str(options.seed)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            cost = Cost(*setting, *map(float, result.stdout.split()))
            table.add(cost)
            what = f"{cost.seconds_per_epoch:8.2f} s {cost.mebibytes:10.0f} MiB"
        elif result.returncode == -signal.SIGKILL:
            what = "killed, as the system does where memory runs out"
        else:
            what = f"failed: {(result.stderr.strip().splitlines() or ['without a word'])[-1]}"
        print(f"{setting.data_set:<12}{describe(*setting[1:]):<22}{what}", flush=True)


def print_cost_of(options: argparse.Namespace) -> None:
    setting = Setting(*options.cost_of)
    x, y = load(options.data, setting.data_set)
    train, _ = next(draw_splits(len(x), options.seed))
    model = Regressor(x.size(1), setting)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train_epoch(model, optimizer, x, y, train)
    start = time.perf_counter()
    train_epoch(model, optimizer, x, y, train)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(seconds, peak / 1024)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the data sets' folders")
    add("--datasets", nargs="+", choices=DATA_SETS, default=AT_HAND)
    add("--attention", nargs="+", choices=ATTENTIONS, default=comparison.COMPARED)
    add("--p", nargs="+", help="orders: numbers, 'none', 'learned'; default: the authors' choice")
    add("--repeats", type=int, default=3, help="default: 3; the authors': 10")
    add("--epochs", type=int, help="default: 1000, for co2 300, for parkinsons 100")
    add("--seed", type=int, default=1000, help="default: 1000, the authors' splits")
    add("--quick", action="store_true", help="airline and co2, one repeat of 5 epochs")
    add("--cost", action="store_true", help="measure time and memory of one epoch instead")
    add("--cost-of", nargs=3, help=argparse.SUPPRESS)
    add_options(parser, plotted="last-epoch errors")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.epochs = 1, 5
        if options.datasets == AT_HAND:
            options.datasets = ["airline", "co2"]
    if options.cost and options.attention == comparison.COMPARED:
        options.attention = ["direct", "mikan", "eager"]
    check_options(parser, options, ["repeats", "epochs", "threads"])
    if not 0 <= options.seed < 1 << 32:
        parser.error(f"--seed must be from 0 to 2^32 - 1, got {options.seed}")
    if options.cost and options.plot is not None:
        parser.error("--cost has no plot")
    if "eager" in options.attention and "learned" in (options.p or []):
        parser.error("--attention eager takes numbers and 'none' as --p")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.cost_of:
        print_cost_of(options)
        return
    try:
        series = {name: load(options.data, name) for name in options.datasets}
    except (OSError, ValueError) as error:
        sys.exit(f"regression.py: {error}")
    if options.cost:
        measure_cost(options)
        return
    table = Table[Run](options.csv)
    divergences = Divergences()
    print(f"{'':34}{'test RMSE, best epoch':<24}test RMSE, last epoch")
    for setting in choose_settings(options):
        name = setting.data_set
        epochs = options.epochs or DATA_SETS[name].epochs
        rows = []
        counts = options.repeats, epochs, options.seed
        for row in fit_repeats(setting, series[name], *counts, divergences):
            rows.append(row)
            table.add(row)
        if rows:
            print_row(setting, rows)
    runs = table.runs
    if options.plot is not None and runs:
        draw_plot(
            options.plot, runs, "data_set", lambda run: run.last_rmse, "test RMSE, last epoch"
        )
    generated = [run for run in runs if run.attention in GENERATED]
    if generated:
        names = {"points": "last_rmse", "mean": "last_rmse_mean", "random": "last_rmse_random"}
        found = [f"{k} {np.mean([getattr(r, v) for r in generated]):.4f}" for k, v in names.items()]
        print(f"Generators at the last epoch, by evaluation: {', '.join(found)}")
    print("The best epoch is selected on the test set, as in the authors' code; the last is not.")
    divergences.end()


if __name__ == "__main__":
    run_program(main)
