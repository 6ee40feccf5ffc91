"""
Linear time
===========

The time of one call against the number of tokens, on one core of the machine that built this page.
From some length on ikattn sums over tokens instead of pairs of tokens. The result is the same, not
an approximation; :func:`ikattn.which_kernels` says from where on.
"""

import time

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import scaled_dot_product_attention

import ikattn

torch.set_num_threads(1)
lengths = [256, 512, 1024, 2048, 4096, 8192, 16384]
frequencies = 8


def seconds(call) -> float:
    """Returns the least of a few times."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


softmax, implicit, linear_from = [], [], None
w1, w2 = (0.05 * torch.randn(2, 32, frequencies) for _ in range(2))
for length in lengths:
    q, k, v = (torch.randn(1, 2, length, 32) for _ in range(3))
    softmax.append(seconds(lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v)))
    implicit.append(
        seconds(lambda q=q, k=k, v=v: ikattn.implicit_kernel_attention(q, k, v, w1, w2))
    )
    is_linear = ikattn.which_kernels(q, k, v, w1, w2).forward.algorithm == "linear"
    linear_from = linear_from or (length if is_linear else None)

plt.figure(figsize=(6, 4))
plt.loglog(lengths, softmax, "o-", label="softmax attention")
plt.loglog(lengths, implicit, "o-", label=f"implicit kernel, {frequencies} frequencies")
plt.axvline(linear_from, color="0.6", linestyle=":", label="linear time from here on")
plt.xticks(lengths, lengths)
plt.minorticks_off()
plt.xlabel("tokens")
plt.ylabel("seconds")
plt.legend()
plt.tight_layout()
