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
    python experiments/regression.py --data DIR --datasets parkinsons --cost
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import comparison
import ikattn
from comparison import (
    GENERATED,
    add_options,
    check_options,
    choose_orders,
    describe,
    draw_plot,
    parse_order,
    spread,
    train_step,
    write_csv,
)

SIZE = 64
HEADS = 8
FREQUENCIES = 64
LEARNING_RATE = 0.01
LARGEST_GRADIENT = 1000.0
TRAINING_FRACTION = 0.9

SCALED = "github.com/MushroomHunting/black-box-quantile-kernels, bbq_tf/datasets"
UCI = "github.com/treforevans/uci_datasets"


class DataSet(NamedTuple):
    files: tuple[str, ...]
    origin: str
    epochs: int
    p: float  # the authors' choice for time series; 2 where none is known


DATA_SETS = {
    "airline": DataSet(
        ("airline_passengers/train.csv", "airline_passengers/test.csv"), SCALED, 1000, 2.0
    ),
    "co2": DataSet(("co2/train.csv", "co2/test.csv"), SCALED, 300, 3.0),
    "housing": DataSet(("housing/data.csv.gz",), UCI, 1000, 2.0),
    "concrete": DataSet(("concrete/train.csv", "concrete/test.csv"), SCALED, 1000, 2.0),
    "parkinsons": DataSet(("parkinsons/data.csv.gz",), UCI, 100, 2.0),
}
AT_HAND = ["airline", "co2", "housing", "parkinsons"]

ATTENTIONS = {
    **comparison.ATTENTIONS,
    "stationary": {"spectral": "stationary"},
    "eager": {"spectral": "direct"},
}


class Setting(NamedTuple):
    data_set: str
    attention: str
    p: str  # a number, "none", "learned"; "-" for softmax


class Run(NamedTuple):
    data_set: str
    attention: str
    p: str
    repeat: int
    epochs: int
    best_epoch: int
    best_rmse: float
    last_rmse: float
    last_train_rmse: float
    last_rmse_mean: float  # generators evaluated at the mean of their noise
    last_rmse_random: float  # and with fresh noise
    seconds: float


class EagerAttention(ikattn.MultiheadAttention):
    """Direct frequencies, computed as the authors' code does: every [H, N, N] step in memory."""

    def forward(self, query: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """Attends within one sequence [N, E]."""
        projected = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(0, 1) for x in projected.chunk(3, -1))
        angles = [[2 * math.pi * x @ w for w in self.spectral.frequencies()] for x in (q, k)]
        phi_q, phi_k = (
            torch.cat([a.cos() + b.cos(), a.sin() + b.sin()], dim=-1) for a, b in angles
        )
        scores = phi_q @ phi_k.mT / (4.0 * FREQUENCIES)
        scores = scores * scores
        logits = torch.log(scores + 1e-5)
        if self.p is not None:
            norm = q.norm(p=self.p, dim=-1, keepdim=True) ** 2
            norm = norm + (k.norm(p=self.p, dim=-1, keepdim=True) ** 2).mT
            logits = logits + norm / (2 * math.sqrt(q.size(-1)))
        output = logits.softmax(-1) @ v
        return self.out_proj(output.transpose(0, 1).flatten(1)), None


class Regressor(nn.Module):
    """The authors' architecture: one encoder layer with its norms after the residual sums."""

    def __init__(self, inputs: int, setting: Setting) -> None:
        super().__init__()
        self.embedding = nn.Linear(inputs, SIZE)
        kind = EagerAttention if setting.attention == "eager" else ikattn.MultiheadAttention
        self.attention = kind(
            SIZE,
            HEADS,
            num_frequencies=FREQUENCIES,
            p=parse_order(setting.p),
            **ATTENTIONS[setting.attention],
        )
        self.attention_norm = nn.LayerNorm(SIZE)
        self.hidden = nn.Linear(SIZE, SIZE)
        self.feed_forward = nn.Linear(SIZE, SIZE)
        self.feed_forward_norm = nn.LayerNorm(SIZE)
        self.output = nn.Linear(SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps inputs [N, inputs], one sequence, to values [N, 1]."""
        tokens = self.embedding(x)
        attended, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        tokens = self.attention_norm(tokens + attended)
        update = self.feed_forward(self.hidden(tokens).relu()).relu()
        values: Tensor = self.output(self.feed_forward_norm(tokens + update))
        return values


def load(directory: Path, name: str) -> tuple[Tensor, Tensor]:
    """Returns inputs [N, inputs] and values [N, 1] in [-1, 1], in the order of the files.

    Raises:
        FileNotFoundError, ValueError: A file is missing, or is not a table of numbers.
    """
    tables = []
    for file in DATA_SETS[name].files:
        path = directory / file
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: --data names the folder above it; it is part of "
                f"{DATA_SETS[name].origin}"
            )
        try:
            tables.append(np.loadtxt(path, delimiter=",", ndmin=2))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if tables[-1].shape[1] != tables[0].shape[1] or tables[-1].shape[1] < 2:
            raise ValueError(f"{path} has {tables[-1].shape[1]} columns")
    table = np.concatenate(tables)
    if name not in ("airline", "co2"):  # those are scaled already
        low, high = table.min(0), table.max(0)
        table = 2 * (table - low) / np.where(high > low, high - low, 1.0) - 1
    x, y = np.split(table.astype(np.float32), [-1], axis=1)
    return torch.from_numpy(x), torch.from_numpy(y)


def draw_splits(size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields indices to train on and to test on, in the authors' order: seed 1000 is theirs."""
    generator = np.random.RandomState(seed)
    while True:
        index = np.arange(size)
        generator.shuffle(index)
        train, test = np.split(index, [int(TRAINING_FRACTION * size)])
        yield torch.from_numpy(train), torch.from_numpy(test)


def train_epoch(
    model: Regressor, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, train: Tensor
) -> None:
    model.train()
    loss = F.mse_loss(model(x)[train], y[train])
    train_step(model, optimizer, loss, examples=len(train), largest_gradient=LARGEST_GRADIENT)


def fit(
    setting: Setting,
    series: tuple[Tensor, Tensor],
    split: tuple[Tensor, Tensor],
    repeat: int,
    epochs: int,
) -> Run:
    """Trains one model on one split, and measures it on the test set after every epoch."""
    (x, y), (train, test) = series, split
    model = Regressor(x.size(1), setting)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    test_rmse = []
    start = time.perf_counter()
    label = f"{setting.data_set}, {describe(*setting[1:])}, repeat {repeat + 1}"
    progress = tqdm(range(epochs), desc=label, unit="epoch", leave=False, disable=None)
    for epoch in progress:
        train_epoch(model, optimizer, x, y, train)
        test_rmse.append(measure(model, x, y, test))
        if epoch % 20 == 0:
            progress.set_postfix_str(f"test RMSE {test_rmse[-1]:.4f}", refresh=False)
    seconds = time.perf_counter() - start
    best = int(np.argmin(test_rmse))
    others = [test_rmse[-1]] * 2
    if setting.attention in GENERATED:
        others = [measure(model, x, y, test, evaluation) for evaluation in ("mean", "random")]
    return Run(
        *setting,
        repeat=repeat,
        epochs=epochs,
        best_epoch=best + 1,
        best_rmse=test_rmse[best],
        last_rmse=test_rmse[-1],
        last_train_rmse=measure(model, x, y, train),
        last_rmse_mean=others[0],
        last_rmse_random=others[1],
        seconds=seconds,
    )


@torch.no_grad()
def measure(
    model: Regressor, x: Tensor, y: Tensor, index: Tensor, evaluation: str = "points"
) -> float:
    """Returns the root mean squared error over some positions of the sequence."""
    model.eval()
    source = model.attention.spectral
    if isinstance(source, ikattn.spectral.Generator):
        source.evaluation = evaluation
    return float(F.mse_loss(model(x)[index], y[index]).sqrt())


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
        row += f"{spread([getattr(run, name) for run in runs], 4)}   "
    per_epoch = np.mean([run.seconds / run.epochs for run in runs])
    print(f"{row}{1e3 * per_epoch:.0f} ms per epoch", flush=True)


def measure_cost(options: argparse.Namespace) -> None:
    """Prints seconds per epoch and peak memory of each setting, each in a process of its own."""
    print("seconds per epoch (training), MiB at the peak above those before the first epoch")
    for setting in choose_settings(options):
        command = [sys.executable, __file__, "--data", str(options.data), "--cost-of", *setting]
        command += ["--threads", str(options.threads)]
        result = subprocess.run(command, capture_output=True, text=True)
        what = result.stdout.strip() if result.returncode == 0 else "failed: out of memory?"
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
    print(f"{seconds:8.2f} s {peak / 1024:10.0f} MiB")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the data sets' folders")
    add("--datasets", nargs="+", choices=DATA_SETS, default=AT_HAND)
    add("--attention", nargs="+", choices=ATTENTIONS, default=list(comparison.ATTENTIONS))
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
    if options.cost and options.attention == list(comparison.ATTENTIONS):
        options.attention = ["direct", "mikan", "eager"]
    check_options(parser, options, ["repeats", "epochs", "threads"])
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
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"regression.py: {error}")
    if options.cost:
        measure_cost(options)
        return
    runs: list[Run] = []
    print(f"{'':34}{'test RMSE, best epoch':<24}test RMSE, last epoch")
    for setting in choose_settings(options):
        name = setting.data_set
        epochs = options.epochs or DATA_SETS[name].epochs
        splits = draw_splits(len(series[name][0]), options.seed)
        rows = []
        for repeat, split in zip(range(options.repeats), splits, strict=False):
            torch.manual_seed(options.seed + repeat)
            rows.append(fit(setting, series[name], split, repeat, epochs))
        print_row(setting, rows)
        runs += rows
        if options.csv is not None:
            write_csv(options.csv, runs)
    if options.plot is not None:
        draw_plot(
            options.plot, runs, "data_set", lambda run: run.last_rmse, "test RMSE, last epoch"
        )
    generated = [run for run in runs if run.attention in GENERATED]
    if generated:
        names = {"points": "last_rmse", "mean": "last_rmse_mean", "random": "last_rmse_random"}
        found = [f"{k} {np.mean([getattr(r, v) for r in generated]):.4f}" for k, v in names.items()]
        print(f"Generators at the last epoch, by evaluation: {', '.join(found)}")
    print("The best epoch is selected on the test set, as in the authors' code; the last is not.")


if __name__ == "__main__":
    main()
