"""Parts that experiments share: the attentions they compare, a training step, tables and plots."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import ikattn

# attention -> options of ikattn.MultiheadAttention and ikattn.convert
ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"kernel": "dot"},
    "rbf": {"kernel": "rbf"},
    "direct": {"spectral": "direct"},
    "ikan": {"spectral": "ikan"},
    "mikan": {"spectral": "mikan"},
    # direct frequencies, a number of them
    **{f"M = {m}": {"spectral": "direct", "num_frequencies": m} for m in (8, 16, 32, 64)},
}
COMPARED = ("softmax", "rbf", "direct", "ikan", "mikan")  # where --attention is not given
GENERATED = ("ikan", "mikan")

Row = TypeVar("Row", bound=NamedTuple)
Fitted = TypeVar("Fitted")

PADDING = 0  # the number of the token that is none


def describe(attention: str, p: str) -> str:
    return attention if p == "-" else f"{attention}, p = {p}"


def choose_orders(attention: str, orders: list[str]) -> list[str]:
    """The orders to run an attention with: of softmax, which has none, "-"."""
    return ["-"] if attention == "softmax" else orders


def parse_order(p: str) -> float | Literal["learned"] | None:
    """The order of the norm that ikattn.MultiheadAttention takes, of its name in a table."""
    if p == "learned":
        return "learned"
    return None if p in ("none", "-") else float(p)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    *,
    examples: int,
    largest_gradient: float,
) -> None:
    """One step down a loss and the regulariser of the model's attention.

    Args:
        model: What the loss was computed with.
        optimizer: Of its parameters.
        loss: A scalar, a mean over examples.
        examples: How many the training set holds: the regulariser counts once for all of them.
        largest_gradient: Norm that the gradient is clipped to.

    Raises:
        FloatingPointError: The gradient is not finite; nothing has been changed.
    """
    loss = loss + ikattn.regularization_loss(model) / examples
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), largest_gradient)
    if not norm.isfinite():
        raise FloatingPointError(f"the loss is {loss.item()}, its gradient's norm {norm.item()}")
    optimizer.step()


class Divergences:
    """Lets the other runs go on when one diverges, and tells of it."""

    def __init__(self) -> None:
        self.count = 0

    def fit(self, label: str, fit: Callable[[], Fitted]) -> Fitted | None:
        """Returns what ``fit`` does, or None, with a line that says why, where it diverges."""
        try:
            return fit()
        except FloatingPointError as error:
            reason = error
        except ValueError as error:  # of frequencies, too, that are not finite any more
            if "must be finite" not in str(error):
                raise
            reason = error
        print(f"left out: {label}: {reason}", flush=True)
        self.count += 1
        return None

    def end(self) -> None:
        """Ends the program with a message where runs have diverged."""
        if self.count:
            sys.exit(f"{Path(sys.argv[0]).name}: {self.count} runs diverged")


def pad(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Token numbers [B, N], every sequence followed by PADDING up to the longest."""
    tokens = torch.full((len(sequences), max(map(len, sequences))), PADDING)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    return tokens


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and, of more than one value, standard deviation, as tables print them."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values):.{digits}f}"


class Table(Generic[Row]):
    """Runs as they end. Each is in the file, if there is one, before the next begins."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.runs: list[Row] = []

    def add(self, *runs: Row) -> None:
        self.runs += runs
        if self.path is not None and runs:
            write_csv(self.path, self.runs)


def write_csv(path: Path, runs: Sequence[NamedTuple]) -> None:
    """Writes one line per run; a file of that name is replaced as a whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(runs[0]._fields)
        writer.writerows(runs)
    unfinished.replace(path)


def draw_plot(
    path: Path, runs: Sequence[Any], panel: str, measure: Callable[[Any], float], label: str
) -> None:
    """Draws every run as a point and their mean as a line, by attention and order.

    Args:
        path: Of the picture.
        runs: With fields attention and p.
        panel: The field whose values each get a panel.
        measure: What to draw of a run.
        label: What that is, with its unit.
    """
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(getattr(run, panel) for run in runs))
    figure, panels = plt.subplots(
        1, len(names), figsize=(4.5 * len(names), 4.5), squeeze=False, layout="constrained"
    )
    for axes, name in zip(panels[0], names, strict=True):
        own = [run for run in runs if getattr(run, panel) == name]
        settings = list(dict.fromkeys((run.attention, run.p) for run in own))
        for row, setting in enumerate(settings):
            found = [measure(run) for run in own if (run.attention, run.p) == setting]
            axes.plot(found, [row] * len(found), "o", alpha=0.5)
            axes.plot(np.mean(found), row, "k|", markersize=18)
        axes.set_yticks(range(len(settings)), [describe(*setting) for setting in settings])
        axes.invert_yaxis()
        axes.set(title=name, xlabel=label)
    figure.savefig(path, dpi=150)
