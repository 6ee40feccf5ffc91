"""The cost of recording maps on a GPU, over the model's forward pass.

python benchmarks/gpu_recording.py            # BERT-base's shape: 32 x 128 and 8 x 512
python benchmarks/gpu_recording.py --llama    # that of Llama 3.2 1B: 2048 and 8192 tokens
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

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


@torch.no_grad()
def measure_llama(length: int, rounds: int) -> str:
    """N summed in bfloat16, by kernels and with weights in blocks of rows."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=length)
    with torch.device("cuda"):
        model = LlamaModel(config).eval().bfloat16()
    ids = torch.randint(1000, 20000, (1, length), device="cuda")

    def recorded() -> None:
        with ikattn.record(model, maps=("summed",), to_cpu=False):
            model(ids)

    times = []
    for call, setting in ((lambda: model(ids), "+"), (recorded, "+"), (recorded, "-")):
        os.environ["IKATTN_KERNELS"] = f"{setting}streamed_maps"
        call()
        times.append(seconds(call, rounds))
    forward, kernels, blocks = times
    return (
        f"{length} tokens: forward {1e3 * forward:.1f} ms, recorded by kernels "
        f"{kernels / forward:.2f}, in blocks {blocks / forward:.2f} of it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--llama", action="store_true")
    options = parser.parse_args()
    if options.llama:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, N summed, bfloat16")
        for length in (2048, 8192):
            print(measure_llama(length, min(3, options.rounds)), flush=True)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, maps {', '.join(MAPS)}")
    for dtype in (torch.float32, torch.float16):
        for batch, length in ((32, 128), (8, 512)):
            print(measure(batch, length, dtype, options.rounds), flush=True)


if __name__ == "__main__":
    main()
