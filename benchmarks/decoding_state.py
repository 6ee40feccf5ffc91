"""Decoding with a state of one size beside features of all keys: time and memory of a token.

export OMP_WAIT_POLICY=passive
python benchmarks/decoding_state.py             # tokens up to 32768: the state is constant
python benchmarks/decoding_state.py --crossover # from how many tokens on it is the faster one
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from timing import interleaved, processor
from torch import Tensor

import ikattn

HEADS, SIZE = 8, 64
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def drawn(frequencies: int, tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    w1, w2 = 0.02 * torch.randn(2, HEADS, SIZE, frequencies)
    return (*torch.randn(3, 1, HEADS, tokens, SIZE), w1, w2)


def decode(frequencies: int, tokens: int, dtype: torch.dtype) -> None:
    """Token by token: medians of 256 tokens, the first of them after 16."""
    query, key, value, w1, w2 = drawn(frequencies, tokens)
    state = ikattn.RecurrentState(w1, w2, dtype=dtype)
    times: list[float] = []
    for t in range(tokens):
        token = (x[:, :, t : t + 1] for x in (query, key, value))
        start = time.perf_counter()
        state.extend(*token)
        times.append(time.perf_counter() - start)
        if t + 1 in (272, 1024, 4096, 16384, tokens):
            first, now = statistics.median(times[16:272]), statistics.median(times[-256:])
            print(
                f"| {frequencies} | {t + 1} | {1e6 * now:.0f} | {now / first:.2f} "
                f"| {state.nbytes / 2**20:.2f} |",
                flush=True,
            )


def rivals_at(frequencies: int, length: int) -> dict[str, Callable[[], Tensor]]:
    """A token after so many: a state in either type, and kept features."""
    query, key, value, w1, w2 = drawn(frequencies, length)
    features = ikattn.KeyFeatures(w1, w2)
    features.append(key)
    one = query[:, :, :1], key[:, :, :1], value[:, :, :1]

    def kept() -> Tensor:
        features.crop(length - 1)
        features.append(one[1])
        return features.attend(one[0], value)

    rivals: dict[str, Callable[[], Tensor]] = {"kept": kept}
    for name, dtype in DTYPES.items():
        state = ikattn.RecurrentState(w1, w2, dtype=dtype)
        state.update(key, value)
        rivals[name] = lambda state=state: state.extend(*one)  # type: ignore[misc]
    return rivals


def compare(frequencies: int, seconds: float) -> None:
    for length in (64, 256, 1024, 2048, 4096, 8192, 16384, 32768):
        best = {k: min(x) for k, x in interleaved(rivals_at(frequencies, length), seconds).items()}
        cells = [f"{1e6 * best[name]:.0f}" for name in ("kept", *DTYPES)]
        print(f"| {frequencies} | {length} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--frequencies", type=int, nargs="+", default=[16])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dtype", choices=DTYPES, default="float64", help="of the sums")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each size, for --crossover")
    parser.add_argument("--crossover", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{processor()}, {options.threads} threads, B = 1, H = {HEADS}, d = d_v = {SIZE}")
    if options.crossover:
        print("| M | tokens | features kept, us | state, float32 | state, float64 |")
    else:
        print("| M | tokens | us a token | x the first | state, MiB |")
    print("|" + "---|" * 5)
    with torch.no_grad():
        for frequencies in options.frequencies:
            if options.crossover:
                compare(frequencies, options.seconds)
            else:
                decode(frequencies, options.tokens, DTYPES[options.dtype])


if __name__ == "__main__":
    main()
