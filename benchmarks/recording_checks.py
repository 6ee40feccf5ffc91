"""What it costs to check that every recorded layer adds up: BERT-base's shape, on the CPU.

A recorded forward pass with the comparisons, and without: a row of the heads, of the projection, of
both norms and of the second half is then neither kept nor compared. Where the output of the
attention flows is followed in both, for maps need it. CPU time, the least of many passes in turns.

python benchmarks/recording_checks.py            # 32, 128 and 512 tokens, one thread
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from transformers import BertConfig, BertModel

import ikattn
from ikattn.analysis._recorder.following import Follower
from ikattn.analysis._recorder.runs import Run

MAPS = ("summed", "with_norm", "encoder")
LAYERS = 12
COMPARING: tuple[tuple[Any, str], ...] = (
    (Run, "note_heads"),
    (Run, "noted_heads_claim"),
    (Follower, "_apart"),
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
def seconds(model: Any, ids: torch.Tensor, passes: int) -> float:
    """Of the fastest recorded pass, after two in which the recording learns the model."""
    best = float("inf")
    with ikattn.record(model, maps=MAPS):
        for number in range(passes + 2):
            begin = time.thread_time()
            model(ids)
            best = min(best, time.thread_time() - begin) if number > 1 else best
    return best


def measure(model: Any, length: int, rounds: int) -> str:
    ids = torch.randint(1000, 20000, (1, length))
    checked, unchecked = [], []
    for _ in range(rounds):
        checked.append(seconds(model, ids, 3))
        with nothing_is_compared():
            unchecked.append(seconds(model, ids, 3))
    whole, rest = min(checked), min(unchecked)
    return (
        f"{length} tokens: recorded {1e3 * whole:.1f} ms, {1e3 * rest:.1f} without checks, which "
        f"take {1e3 * (whole - rest) / LAYERS:.2f} ms a layer, {100 * (1 - rest / whole):.1f} %"
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
