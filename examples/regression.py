"""Repeat the regression experiment of "Implicit Kernel Attention" (AAAI 2021) on two time series.

A transformer of one layer (8 heads of size 8, 64 frequencies) reads a whole series of times x as
one sequence and gives a value y for each. A tenth of the values, drawn at random, is kept from
training and is the test set.

As in the authors' code, the best-epoch error is that of the epoch which does best on the test set:
it is selected on the very data it is measured on, and so is lower than one could know beforehand.
The last-epoch error is not selected.

--data DIR holds airline_passengers/ and co2/, each with train.csv and test.csv: columns x and y,
scaled to [-1, 1], without a header.

    pip install 'ikattn[demo]'
    python examples/regression.py --data DIR
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import ikattn

Kernel = Literal["dot", "rbf", "implicit"]

SIZE = 64
HEADS = 8
FREQUENCIES = 64
LEARNING_RATE = 0.01
LARGEST_GRADIENT = 1000.0
TRAINING_FRACTION = 0.9


class DataSet(NamedTuple):
    folder: str
    epochs: int
    p: float  # the authors' choice


class Series(NamedTuple):
    x: Tensor  # [N, 1]
    y: Tensor  # [N, 1]


class Setting(NamedTuple):
    data_set: str
    kernel: Kernel
    p: float | None  # None for "dot"


class Run(NamedTuple):
    data_set: str
    kernel: Kernel
    p: float | None
    repeat: int
    epochs: int
    best_epoch: int
    best_rmse: float
    last_rmse: float
    last_train_rmse: float
    seconds: float


DATA_SETS = {
    "airline": DataSet("airline_passengers", epochs=1000, p=2.0),
    "co2": DataSet("co2", epochs=300, p=3.0),
}

# What the authors' code gave, unmodified: best epoch, last epoch (the footnote says for how many).
AUTHORS = {
    Setting("airline", "dot", None): ("0.138 ± 0.014", "0.149 ± 0.022"),
    Setting("airline", "implicit", 2.0): ("0.100 ± 0.036", "0.140 ± 0.029"),
    Setting("co2", "dot", None): ("0.0596", "0.0603"),
    Setting("co2", "implicit", 3.0): ("0.0574", "0.0611"),
}

FOOTNOTE = """\
Mean ± standard deviation over runs that differ in split and initial values. The best epoch
is selected on the test set, as in the authors' code; the last epoch is not. Authors: their code,
unmodified, 3 runs of 1000 epochs on airline and 1 run of 300 on co2."""


class SeriesTransformer(nn.Module):
    """The authors' architecture: one encoder layer with its norms after the residual sums."""

    def __init__(self, kernel: Kernel, p: float | None) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, SIZE)
        self.attention = ikattn.MultiheadAttention(
            SIZE, HEADS, kernel=kernel, p=p, num_frequencies=FREQUENCIES
        )
        self.attention_norm = nn.LayerNorm(SIZE)
        self.hidden = nn.Linear(SIZE, SIZE)
        self.feed_forward = nn.Linear(SIZE, SIZE)
        self.feed_forward_norm = nn.LayerNorm(SIZE)
        self.output = nn.Linear(SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps times [N, 1], one sequence, to values [N, 1]."""
        tokens = self.embedding(x)
        attended, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        tokens = self.attention_norm(tokens + attended)
        update = self.feed_forward(self.hidden(tokens).relu()).relu()
        values: Tensor = self.output(self.feed_forward_norm(tokens + update))
        return values


def load_series(directory: Path, name: str) -> Series:
    """Returns a series, in the order of its two files.

    Raises:
        FileNotFoundError, ValueError: A file is missing, or is not two columns of numbers.
    """
    tables = []
    for part in ("train.csv", "test.csv"):
        path = directory / DATA_SETS[name].folder / part
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; --data names the folder above it")
        try:
            table = np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if table.shape[1] != 2:
            raise ValueError(f"{path} must have two columns, x and y, got {table.shape[1]}")
        tables.append(table)
    x, y = torch.from_numpy(np.concatenate(tables)).split(1, dim=1)
    return Series(x, y)


def draw_splits(size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields indices to train on and to test on, in the authors' order: seed 1000 is theirs."""
    generator = np.random.RandomState(seed)
    while True:
        index = np.arange(size)
        generator.shuffle(index)
        train, test = np.split(index, [int(TRAINING_FRACTION * size)])
        yield torch.from_numpy(train), torch.from_numpy(test)


def fit(
    setting: Setting, series: Series, split: tuple[Tensor, Tensor], repeat: int, epochs: int
) -> Run:
    """Trains one model on one split, and measures it on the test set after every epoch."""
    train, test = split
    model = SeriesTransformer(setting.kernel, setting.p)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    test_rmse = []
    start = time.perf_counter()
    label = f"{setting.data_set}, {describe(setting)}, repeat {repeat + 1}"
    progress = tqdm(range(epochs), desc=label, unit="epoch", leave=False, disable=None)
    for epoch in progress:
        model.train()
        loss = F.mse_loss(model(series.x)[train], series.y[train])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        test_rmse.append(measure(model, series, test))
        if epoch % 20 == 0:
            progress.set_postfix_str(f"test RMSE {test_rmse[-1]:.4f}", refresh=False)
    seconds = time.perf_counter() - start
    best = int(np.argmin(test_rmse))
    return Run(
        *setting,
        repeat=repeat,
        epochs=epochs,
        best_epoch=best + 1,
        best_rmse=test_rmse[best],
        last_rmse=test_rmse[-1],
        last_train_rmse=measure(model, series, train),
        seconds=seconds,
    )


@torch.no_grad()
def measure(model: nn.Module, series: Series, index: Tensor) -> float:
    """Returns the root mean squared error over some positions of the series."""
    model.eval()
    return float(F.mse_loss(model(series.x)[index], series.y[index]).sqrt())


def choose_settings(options: argparse.Namespace) -> list[Setting]:
    settings = []
    for data_set in options.datasets:
        for kernel in options.kernel:
            orders = [None] if kernel == "dot" else options.p or [DATA_SETS[data_set].p]
            settings += [Setting(data_set, kernel, p) for p in orders]
    return settings


def describe(setting: Setting) -> str:
    return setting.kernel if setting.p is None else f"{setting.kernel}, p = {setting.p:g}"


def print_header() -> None:
    print(f"{'':28}{'test RMSE, best epoch':^34}{'test RMSE, last epoch':^34}")
    print(f"{'data set':<10}{'kernel':<18}", end="")
    print(f"{'here':<18}{'authors':<16}" * 2 + "time per run")


def print_row(setting: Setting, runs: list[Run]) -> None:
    authors = AUTHORS.get(setting, ("-", "-"))
    row = f"{setting.data_set:<10}{describe(setting):<18}"
    for errors, theirs in zip(
        ([run.best_rmse for run in runs], [run.last_rmse for run in runs]), authors, strict=True
    ):
        here = f"{np.mean(errors):.4f}" + (f" ± {np.std(errors):.4f}" if len(errors) > 1 else "")
        row += f"{here:<18}{theirs:<16}"
    print(f"{row}{np.mean([run.seconds for run in runs]):.0f} s", flush=True)


def print_comparison(runs: list[Run]) -> None:
    """Says how often a kernel beat softmax; runs of one repeat share the split of the data."""
    softmax = {(run.data_set, run.repeat): run for run in runs if run.kernel == "dot"}
    for setting in dict.fromkeys(Setting(*run[:3]) for run in runs if run.kernel != "dot"):
        pairs = [
            (run, softmax[run.data_set, run.repeat])
            for run in runs
            if Setting(*run[:3]) == setting and (run.data_set, run.repeat) in softmax
        ]
        if pairs:
            best = sum(run.best_rmse < dot.best_rmse for run, dot in pairs)
            last = sum(run.last_rmse < dot.last_rmse for run, dot in pairs)
            print(
                f"{setting.data_set}: {describe(setting)} is below dot on {best} of {len(pairs)} "
                f"splits by best epoch, on {last} by last epoch."
            )


def write_csv(path: Path, runs: list[Run]) -> None:
    """Writes one line per run; a file of that name is replaced as a whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Run._fields)
        writer.writerows(runs)
    unfinished.replace(path)


def parse_options() -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of airline_passengers/ and co2/")
    add("--datasets", nargs="+", choices=DATA_SETS, default=list(DATA_SETS))
    add("--kernel", nargs="+", choices=get_args(Kernel), default=["dot", "implicit"])
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
        series = {name: load_series(options.data, name) for name in options.datasets}
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"regression.py: {error}")

    runs: list[Run] = []
    print_header()
    for setting in choose_settings(options):
        name = setting.data_set
        epochs = options.epochs or DATA_SETS[name].epochs
        splits = draw_splits(len(series[name].x), options.seed)
        rows = []
        for repeat, split in zip(range(options.repeats), splits, strict=False):
            torch.manual_seed(options.seed + repeat)
            rows.append(fit(setting, series[name], split, repeat, epochs))
        print_row(setting, rows)
        runs += rows
        if options.csv is not None:
            write_csv(options.csv, runs)
    print_comparison(runs)
    print(FOOTNOTE)
    if options.csv is not None:
        print(f"Every run: {options.csv}")


if __name__ == "__main__":
    main()
