"""
Decoding: time and memory of a token
====================================

Two ways to keep the past when tokens come one by one. :class:`ikattn.KeyFeatures` keeps each key,
like a cache of keys and values; its memory and the time of a token grow with the text.
:class:`ikattn.RecurrentState` keeps sums, whose size and time stay as they are.
"""

import time

import matplotlib.pyplot as plt
import torch

import ikattn

torch.set_num_threads(1)
torch.manual_seed(0)
w1, w2 = (0.1 * torch.randn(4, 32, 8) for _ in range(2))
lengths = [256, 1024, 4096, 16384, 65536]
q = torch.randn(1, 4, 1, 32)
k, v = (torch.randn(1, 4, lengths[-1], 32) for _ in range(2))


class Cache(ikattn.KeyFeatures):
    """Features of keys, and the values beside them."""

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes in more tokens."""
        self.append(keys)
        self.values = v[:, :, : len(self)]

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Returns what a query gets from all tokens so far."""
        return super().attend(query, self.values)


@torch.no_grad()
def cost(kept) -> tuple[list[float], list[float]]:
    """Returns the milliseconds of a token, and the megabytes, at each length."""
    times, sizes = [], []
    for begin, end in zip([0, *lengths], lengths, strict=False):
        kept.update(k[:, :, begin:end], v[:, :, begin:end])
        runs = []
        for _ in range(20):
            start = time.perf_counter()
            kept.attend(q)
            runs.append(time.perf_counter() - start)
        times.append(min(runs) * 1e3)
        values = getattr(kept, "values", None)
        sizes.append((kept.nbytes + (0 if values is None else 4 * values.numel())) / 1e6)
    return times, sizes


figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for kind, label in ((Cache, "KeyFeatures"), (ikattn.RecurrentState, "RecurrentState")):
    for axis, numbers in zip(axes, cost(kind(w1, w2)), strict=True):
        axis.loglog(lengths, numbers, "o-", label=label)
axes[0].set(xlabel="tokens so far", ylabel="milliseconds of the next token")
axes[1].set(xlabel="tokens so far", ylabel="megabytes")
axes[0].legend()
