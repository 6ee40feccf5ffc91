"""The regression protocol of "Implicit Kernel Attention" (AAAI 2021): data, model, one run.

A transformer of one layer (8 heads of size 8, 64 frequencies) reads a whole data set as one
sequence of inputs x and gives a value y for each. A tenth of the values, drawn at random, is kept
from training and is the test set.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import comparison
import ikattn
from comparison import GENERATED, describe, parse_order, train_step

SIZE = 64
HEADS = 8
FREQUENCIES = 64
LEARNING_RATE = 0.01
LARGEST_GRADIENT = 1000.0
TRAINING_FRACTION = 0.9
FEWEST = 10  # rows: a tenth of them is the test set

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
            p=parse_order(setting.p),
            **({"num_frequencies": FREQUENCIES} | ATTENTIONS[setting.attention]),
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of numpy, about files without data
                tables.append(np.loadtxt(path, delimiter=",", ndmin=2))
        except (ValueError, OSError, EOFError) as error:  # of the text, or of what it is packed in
            raise ValueError(f"{path}: {error}") from None
        if tables[-1].size == 0:
            raise ValueError(f"{path} holds no numbers")
        finite = (np.abs(tables[-1]) <= np.finfo(np.float32).max).all(1)
        if not finite.all():
            raise ValueError(
                f"{path}, row {1 + finite.argmin()}: expected finite numbers of float32"
            )
        columns, expected = tables[-1].shape[1], max(tables[0].shape[1], 2)
        if columns != expected:
            raise ValueError(f"{path} must have {expected} columns, the value last, got {columns}")
    table = np.concatenate(tables)
    if len(table) < FEWEST:
        raise ValueError(f"{path.parent}: expected at least {FEWEST} rows in all, got {len(table)}")
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


def fit_repeats(
    setting: Setting,
    series: tuple[Tensor, Tensor],
    repeats: int,
    epochs: int,
    seed: int,
    divergences: comparison.Divergences,
) -> Iterator[Run]:
    """Trains a model for each repeat, on a split and from initial values of its own."""
    splits = draw_splits(len(series[0]), seed)
    for repeat, split in zip(range(repeats), splits, strict=False):
        torch.manual_seed(seed + repeat)
        run = divergences.fit(
            label_of(setting, repeat), partial(fit, setting, series, split, repeat, epochs)
        )
        if run is not None:
            yield run


def label_of(setting: Setting, repeat: int) -> str:
    return f"{setting.data_set}, {describe(*setting[1:])}, repeat {repeat + 1}"


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
    start = time.process_time()
    label = label_of(setting, repeat)
    progress = tqdm(range(epochs), desc=label, unit="epoch", leave=False, disable=None)
    for epoch in progress:
        train_epoch(model, optimizer, x, y, train)
        test_rmse.append(measure(model, x, y, test))
        if epoch % 20 == 0:
            progress.set_postfix_str(f"test RMSE {test_rmse[-1]:.4f}", refresh=False)
    seconds = time.process_time() - start
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
