"""The cost of packed sequences beside a batch of as many tokens, on the CPU.

Interleaved medians, as ratios to the dense operator over a batch: forward, and with backward. Of
sequences of different lengths the batch is padded to the longest, with a bias that hides padding.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from timing import interleaved
from torch import Tensor

import ikattn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--frequencies", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    different = torch.randint(32, 513, (64,), generator=generator)
    for name, lengths in (
        ("64 sequences of 256", torch.full((64,), 256)),
        ("4 sequences of 4096", torch.full((4,), 4096)),
        ("512 sequences of 16", torch.full((512,), 16)),
        ("64 of 32 to 512", different),
    ):
        for is_causal in (False, True):
            ratios = compare(given, lengths, is_causal)
            told = ", ".join(f"{which} {ratio:.3f}" for which, ratio in ratios.items())
            print(f"{name:22} {'causal' if is_causal else '      '}  {told}")


def compare(given: argparse.Namespace, lengths: Tensor, is_causal: bool) -> dict[str, float]:
    """Ratios of time, packed to batch."""
    sequences, longest = lengths.numel(), int(lengths.max())
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    real = torch.arange(longest) < lengths[:, None]  # [N, longest]
    packed = [torch.randn(int(ends[-1]), given.heads, given.size) for _ in range(3)]
    batch = [torch.zeros(sequences, longest, given.heads, given.size) for _ in range(3)]
    for rows, tokens in zip(batch, packed, strict=True):
        rows[real] = tokens
    leaves = [x.requires_grad_() for x in (*packed, *batch)]
    frequencies = [
        (0.1 * torch.randn(given.heads, given.size, given.frequencies)).requires_grad_()
        for _ in range(2)
    ]
    bias = None if bool(real.all()) else torch.zeros(real.shape).masked_fill(~real, -torch.inf)

    def of_packed() -> Tensor:
        return ikattn.implicit_kernel_attention_varlen(
            *packed, *frequencies, ends, ends, causal=is_causal
        )

    def of_batch() -> Tensor:
        return ikattn.implicit_kernel_attention(
            *(x.transpose(1, 2) for x in batch),
            *frequencies,
            key_bias=None if bias is None else bias[:, None],
            is_causal=is_causal,
        )

    def backward(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for x in (*leaves, *frequencies):
                x.grad = None
            output = forward()
            output.backward(output.detach())

        return run

    def ratio(rivals: dict[str, Callable[[], object]]) -> float:
        packed_times, batch_times = interleaved(rivals, given.seconds).values()
        return statistics.median(packed_times) / statistics.median(batch_times)

    with torch.no_grad():
        forward = ratio({"packed": of_packed, "batch": of_batch})
    both = ratio({"packed": backward(of_packed), "batch": backward(of_batch)})
    return {"forward": forward, "with backward": both}


if __name__ == "__main__":
    main()
