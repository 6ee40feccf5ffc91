"""What recording maps costs on a GPU: BERT-base's shape, over its forward pass.

python benchmarks/gpu_recording.py            # batches of 32 x 128 and 8 x 512, float32, float16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import BertConfig, BertModel

import ikattn

MAPS = ("summed", "with_norm", "encoder")


def seconds(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@torch.no_grad()
def measure(batch: int, length: int, dtype: torch.dtype, rounds: int) -> str:
    model = BertModel(BertConfig()).eval().to("cuda", dtype)
    ids = torch.randint(1000, 20000, (batch, length), device="cuda")

    def forward() -> None:
        model(ids)

    def recorded(**options: object) -> Callable[[], None]:
        def call() -> None:
            with ikattn.record(model, maps=MAPS, **options):  # type: ignore[arg-type]
                model(ids)

        return call

    calls = {"": forward, "recorded": recorded(), "kept on the GPU": recorded(to_cpu=False)}
    for call in calls.values():
        call()
    times = {name: seconds(call, rounds) for name, call in calls.items()}
    ratios = ", ".join(f"{name} {times[name] / times['']:.2f}" for name in calls if name)
    return f"{batch} x {length} {dtype}: forward {1e3 * times['']:.1f} ms, {ratios} of it"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, maps {', '.join(MAPS)}")
    for dtype in (torch.float32, torch.float16):
        for batch, length in ((32, 128), (8, 512)):
            print(measure(batch, length, dtype, options.rounds), flush=True)


if __name__ == "__main__":
    main()
