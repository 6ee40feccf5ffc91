"""Repeat the regression experiment of "Implicit Kernel Attention" (AAAI 2021) on two time series.

A transformer of one layer (8 heads of size 8, 64 frequencies) reads a whole series of times x as
one sequence and gives a value y for each. A tenth of the values, drawn at random, is kept from
training and is the test set.

As in the authors' code, the best-epoch error is that of the epoch which does best on the test set:
it is selected on the very data it is measured on, and so is lower than one could know beforehand.
The last-epoch error is not selected.

Data, model and training are those of experiments/regression_protocol.py, which this file runs with
the authors' settings and beside the authors' results.

--data DIR holds airline_passengers/ and co2/, each with train.csv and test.csv: columns x and y,
scaled to [-1, 1], without a header.

    pip install 'ikattn[demo]'
    python examples/regression.py --data DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

from comparison import Divergences, describe, spread, write_csv
from regression_protocol import DATA_SETS, Run, Setting, fit_repeats, load

# --kernel -> what the protocol calls it
KERNELS = {"dot": "softmax", "rbf": "rbf", "implicit": "direct"}
SERIES = ("airline", "co2")

# Results of the authors' unmodified code: best epoch, last epoch (the footnote has their number).
AUTHORS = {
    ("airline", "dot", "-"): ("0.138 ± 0.014", "0.149 ± 0.022"),
    ("airline", "implicit", "2"): ("0.100 ± 0.036", "0.140 ± 0.029"),
    ("co2", "dot", "-"): ("0.0596", "0.0603"),
    ("co2", "implicit", "3"): ("0.0574", "0.0611"),
}

FOOTNOTE = """\
Mean ± standard deviation over runs that differ in split and initial values. The best epoch
is selected on the test set, as in the authors' code; the last epoch is not. Authors: their code,
unmodified, 3 runs of 1000 epochs on airline and 1 run of 300 on co2."""


def choose_settings(options: argparse.Namespace) -> list[Setting]:
    settings = []
    for data_set in options.datasets:
        for kernel in options.kernel:
            orders = [f"{p:g}" for p in options.p or [DATA_SETS[data_set].p]]
            orders = ["-"] if kernel == "dot" else orders
            settings += [Setting(data_set, kernel, p) for p in orders]
    return settings


def print_header() -> None:
    print(f"{'':28}{'test RMSE, best epoch':^34}{'test RMSE, last epoch':^34}")
    print(f"{'data set':<10}{'kernel':<18}", end="")
    print(f"{'here':<18}{'authors':<16}" * 2 + "time per run")


def print_row(setting: Setting, runs: list[Run]) -> None:
    authors = AUTHORS.get(setting, ("-", "-"))
    row = f"{setting.data_set:<10}{describe(*setting[1:]):<18}"
    for errors, theirs in zip(
        ([run.best_rmse for run in runs], [run.last_rmse for run in runs]), authors, strict=True
    ):
        row += f"{spread(errors, 4):<18}{theirs:<16}"
    print(f"{row}{np.mean([run.seconds for run in runs]):.0f} s", flush=True)


def print_comparison(runs: list[Run]) -> None:
    """Says how often a kernel beat softmax; runs of one repeat share the split of the data."""
    softmax = {(run.data_set, run.repeat): run for run in runs if run.attention == "dot"}
    for setting in dict.fromkeys(Setting(*run[:3]) for run in runs if run.attention != "dot"):
        pairs = [
            (run, softmax[run.data_set, run.repeat])
            for run in runs
            if Setting(*run[:3]) == setting and (run.data_set, run.repeat) in softmax
        ]
        if pairs:
            best = sum(run.best_rmse < dot.best_rmse for run, dot in pairs)
            last = sum(run.last_rmse < dot.last_rmse for run, dot in pairs)
            print(
                f"{setting.data_set}: {describe(*setting[1:])} is below dot on {best} of "
                f"{len(pairs)} splits by best epoch, on {last} by last epoch."
            )


def parse_options() -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of airline_passengers/ and co2/")
    add("--datasets", nargs="+", choices=SERIES, default=SERIES)
    add("--kernel", nargs="+", choices=KERNELS, default=["dot", "implicit"])
    add("--p", nargs="+", type=float, help="orders of the norm; default: 2 for airline, 3 for co2")
    add("--repeats", type=int, default=10, help="default: 10, as the authors'")
    add("--epochs", type=int, help="default: 1000 for airline, 300 for co2")
    add("--seed", type=int, default=1000, help="default: 1000, the authors' splits")
    add("--quick", action="store_true", help="one repeat of 5 epochs")
    add("--csv", type=Path, help="write every run to this file")
    add("--threads", type=int, default=1, help="for torch; default: 1, the tensors are small")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.epochs = 1, 5
    if min(options.repeats, options.threads, 1 if options.epochs is None else options.epochs) < 1:
        parser.error("--repeats, --epochs and --threads must be at least 1")
    if min(options.p or [1]) < 1:
        parser.error("--p must be at least 1")
    if options.csv is not None and not options.csv.parent.is_dir():
        parser.error(f"--csv: there is no directory {options.csv.parent}")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    try:
        series = {name: load(options.data, name) for name in options.datasets}
    except (OSError, ValueError) as error:
        sys.exit(f"regression.py: {error}")

    runs: list[Run] = []
    divergences = Divergences()
    print_header()
    for setting in choose_settings(options):
        name = setting.data_set
        epochs = options.epochs or DATA_SETS[name].epochs
        protocol = setting._replace(attention=KERNELS[setting.attention])
        counts = options.repeats, epochs, options.seed
        fitted = fit_repeats(protocol, series[name], *counts, divergences)
        rows = [run._replace(attention=setting.attention) for run in fitted]
        if not rows:
            continue
        print_row(setting, rows)
        runs += rows
        if options.csv is not None:
            write_csv(options.csv, runs)
    print_comparison(runs)
    print(FOOTNOTE)
    if options.csv is not None and runs:
        print(f"Every run: {options.csv}")
    divergences.end()


if __name__ == "__main__":
    main()
