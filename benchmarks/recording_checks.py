"""What it costs to check that every recorded layer adds up: BERT-base's shape, on the CPU.

The time in the hooks of a recording, less that of making maps and what they are made of, over the
recorded forward pass.

python benchmarks/recording_checks.py            # 32, 128 and 512 tokens, one thread
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from transformers import BertConfig, BertModel

import ikattn
from ikattn.analysis._recorder import following, making
from ikattn.analysis._recorder.hooks import Hook

MAPS = ("summed", "with_norm", "encoder")
LAYERS = 12


class Clock:
    """Seconds of this thread between begin and end, less those of clocks that run in between."""

    running: ClassVar[list[float]] = []  # of each, what is not its own

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def runs(self) -> Iterator[None]:
        self.running.append(0.0)
        begin = time.thread_time()
        try:
            yield
        finally:
            took = time.thread_time() - begin
            self.seconds += took - self.running.pop()
            if self.running:
                self.running[-1] += took


def clocks() -> tuple[Clock, Clock]:
    """Clocks of hooks and of maps, from now on."""
    hooks, maps = Clock(), Clock()

    def call_hook(self: Hook, *args: Any, **kwargs: Any) -> Any:
        with hooks.runs():
            return self._call(*args, **kwargs)

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any) -> Any:
            with maps.runs():
                return call(*args)

        return timed_call

    Hook.__call__ = call_hook  # type: ignore[method-assign]
    making.make_maps = timed(making.make_maps)
    following.NormStats.of = staticmethod(timed(following.NormStats.of))  # type: ignore[method-assign]
    return hooks, maps


@torch.no_grad()
def measure(model: Any, length: int, rounds: int, hooks: Clock, maps: Clock) -> str:
    ids = torch.randint(1000, 20000, (1, length))
    best = (float("inf"), 0.0, 0.0)
    with ikattn.record(model, maps=MAPS):
        for _ in range(rounds):
            hooks.seconds = maps.seconds = 0.0
            begin = time.thread_time()
            model(ids)
            best = min(best, (time.thread_time() - begin, hooks.seconds, maps.seconds))
    whole, checks, made = best
    return (
        f"{length} tokens: recorded {1e3 * whole:.0f} ms, maps {100 * made / whole:.0f} %, checks "
        f"{1e3 * checks / LAYERS:.2f} ms a layer, {100 * checks / whole:.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = BertModel(BertConfig()).eval()
    hooks, maps = clocks()
    for length in options.lengths:
        print(measure(model, length, options.rounds, hooks, maps), flush=True)


if __name__ == "__main__":
    main()
