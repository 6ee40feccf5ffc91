"""One training step of an attention layer, by the source of its frequencies.

A step is forward, backward (with the regulariser) and Adam, of one ikattn.MultiheadAttention.

export OMP_WAIT_POLICY=passive
python benchmarks/spectral.py                      # N = 512, d = 64, M = 64, H = 8, B = 2
python benchmarks/spectral.py --heads 1 --batch 1  # where what a call costs weighs most
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from timing import interleaved, processor

import ikattn
from ikattn.spectral.factory import SOURCES


def make_step(source: str, options: argparse.Namespace) -> Callable[[], None]:
    torch.manual_seed(0)
    size = options.heads * options.head_dim
    attention = ikattn.MultiheadAttention(
        size,
        options.heads,
        batch_first=True,
        spectral=source,
        num_frequencies=options.frequencies,
        p="learned" if options.learned_p else 2.0,
    )
    optimizer = torch.optim.Adam(attention.parameters(), lr=1e-3)
    x = torch.randn(options.batch, options.length, size)

    def step() -> None:
        optimizer.zero_grad()
        output, _ = attention(x, x, x, need_weights=False)
        loss = output.square().mean() + ikattn.regularization_loss(attention) / 1000
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--batch", type=int, default=2)
    add("--heads", type=int, default=8)
    add("--head-dim", type=int, default=64, help="d")
    add("--length", type=int, default=512, help="N")
    add("--frequencies", type=int, default=64, help="M")
    add("--learned-p", action="store_true", help="learn the order of the norm")
    add("--seconds", type=float, default=40.0)
    add("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{processor()}, torch {torch.__version__}, {options.threads} thread(s)")
    print(
        f"B = {options.batch}, H = {options.heads}, N = {options.length}, d = {options.head_dim}, "
        f"M = {options.frequencies}: milliseconds per training step"
    )
    samples = interleaved({name: make_step(name, options) for name in SOURCES}, options.seconds)
    direct = samples["direct"]
    for name, times in samples.items():
        best, median = min(times), statistics.median(times)
        print(
            f"  {name:10s} best {1e3 * best:8.1f}  median {1e3 * median:8.1f}   x direct: "
            f"{best / min(direct):5.2f} {median / statistics.median(direct):5.2f}"
            f"   ({len(times)} samples)"
        )


if __name__ == "__main__":
    main()
