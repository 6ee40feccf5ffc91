"""The cost of checking that every recorded layer adds up: BERT-base's shape, on the CPU.

A recorded forward pass with the comparisons, and without: a row of the heads, of the projection, of
both norms and of the second half is then neither kept nor compared. Where the output of the
attention flows is followed in both, for maps need it. CPU time of passes in turns, the median of
their differences.

python benchmarks/recording_checks.py            # 32, 128 and 512 tokens, one thread
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import BertConfig, BertModel

import ikattn
from ikattn.recorder.runs.projections import Projections
from ikattn.recorder.runs.run import Run

MAPS = ("summed", "with_norm", "encoder")
LAYERS = 12
COMPARING: tuple[tuple[Any, str], ...] = (
    (Run, "note_heads"),
    (Run, "noted_heads_claim"),
    (Projections, "_apart"),
    (Run, "norm_claim"),
    (Run, "note_other"),
    (Run, "second_half"),
)


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


@contextlib.contextmanager
def nothing_is_compared() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name in COMPARING:
            stack.enter_context(mock.patch.object(owner, name, nothing))
        yield


@torch.no_grad()
def passes(model: Any, ids: torch.Tensor) -> list[tuple[float, float]]:
    """Seconds with comparisons and without, of passes in turns, in a recording of its own."""

    def seconds() -> float:
        begin = time.thread_time()
        model(ids)
        return time.thread_time() - begin

    pairs = []
    with ikattn.record(model, maps=MAPS):
        for number in range(7):
            checked = seconds()
            with nothing_is_compared():
                unchecked = seconds()
            if number > 1:  # in the first ones the recording learns the model
                pairs.append((checked, unchecked))
    return pairs


def measure(model: Any, length: int, rounds: int) -> str:
    ids = torch.randint(1000, 20000, (1, length))
    pairs = [pair for _ in range(rounds) for pair in passes(model, ids)]
    whole = median(checked for checked, _ in pairs)
    checks = median(checked - unchecked for checked, unchecked in pairs)
    return (
        f"{length} tokens: recorded {1e3 * whole:.1f} ms, of which checks take "
        f"{1e3 * checks / LAYERS:.2f} ms a layer, {100 * checks / whole:.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = BertModel(BertConfig()).eval()
    for length in options.lengths:
        print(measure(model, length, options.rounds), flush=True)


if __name__ == "__main__":
    main()
