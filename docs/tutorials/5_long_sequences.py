"""
Long sequences in linear time
=============================

The cost of attention grows with the square of the length. With few frequencies ikattn computes the
same sum in another order, at a cost that grows with the length. In this tutorial you measure it,
check it, and decode in constant memory.
"""

# %%
# Ask before you compute
# ----------------------
#
# :func:`ikattn.which_kernels` takes the arguments of a call, and tells which algorithm would
# compute it. It computes nothing. ``expand`` makes a tensor of any length that takes no memory.

import time

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import scaled_dot_product_attention

import ikattn

torch.set_num_threads(1)
torch.manual_seed(0)
heads, size = 4, 32


def first_linear(frequencies: int, **options: bool) -> int:
    """Returns the first length, of powers of two, that takes linear time."""
    w = torch.zeros(heads, size, frequencies)
    for length in (2**n for n in range(6, 20)):
        x = torch.zeros(1).expand(1, heads, length, size)
        if ikattn.which_kernels(x, x, x, w, w, **options).forward.algorithm == "linear":
            return length
    raise ValueError("not even half a million tokens")


for frequencies in (8, 16, 32, 64):
    print(
        f"{frequencies:3} frequencies: linear from {first_linear(frequencies):6} tokens on, "
        f"causal from {first_linear(frequencies, is_causal=True):6}"
    )

# %%
# Fewer frequencies are faster, and tell fewer tokens apart. :doc:`/docs/experiments/recall` shows
# how many you need.
#
# Measure
# -------

lengths = [512, 1024, 2048, 4096, 8192]
w1, w2 = (0.05 * torch.randn(heads, size, 16) for _ in range(2))


def seconds(call, *tensors: torch.Tensor, **options: bool) -> float:
    """Returns the shorter of two times."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        call(*tensors, **options)
        times.append(time.perf_counter() - start)
    return min(times)


plt.figure(figsize=(6, 4))
for is_causal, style in ((False, "-"), (True, "--")):
    softmax, ours = [], []
    for length in lengths:
        q, k, v = (torch.randn(1, heads, length, size) for _ in range(3))
        softmax.append(seconds(scaled_dot_product_attention, q, k, v, is_causal=is_causal))
        ours.append(seconds(ikattn.implicit_kernel_attention, q, k, v, w1, w2, is_causal=is_causal))
    suffix = ", causal" if is_causal else ""
    plt.loglog(lengths, softmax, "o" + style, color="C0", label="softmax" + suffix)
    plt.loglog(lengths, ours, "o" + style, color="C1", label="16 frequencies" + suffix)
plt.xticks(lengths, lengths)
plt.minorticks_off()
plt.xlabel("tokens")
plt.ylabel("seconds on one core")
plt.legend()
plt.tight_layout()

# %%
# It is the same sum
# ------------------
#
# Linear time is no approximation: compare it with the formula, in float64 and in quadratic time.

q, k, v = (torch.randn(1, heads, 4096, size) for _ in range(3))
output = ikattn.implicit_kernel_attention(q, k, v, w1, w2)
exact = ikattn.reference.implicit_kernel_attention(*(x.double() for x in (q, k, v, w1, w2)))
print(f"largest error: {float((output - exact).abs().max() / exact.abs().max()):.1e}")

# %%
# Decode in constant memory
# -------------------------
#
# A model that writes text adds one token after the other. With softmax attention it must keep all
# keys and values. Here sums are enough: :class:`ikattn.RecurrentState` holds them, and its size
# does not depend on the number of tokens.

w1, w2 = w1[..., :8], w2[..., :8]
state = ikattn.RecurrentState(w1, w2)
tokens, kept, cache = [], [], []
for n in range(0, 4096, 128):
    state.update(k[:, :, n : n + 128], v[:, :, n : n + 128])
    tokens.append(n + 128)
    kept.append(state.nbytes)
    cache.append((n + 128) * heads * 2 * size * 4)

last = state.attend(q[:, :, -1:])
exact = ikattn.implicit_kernel_attention(q[:, :, -1:], k, v, w1, w2)
print(f"error after {len(state)} tokens: {float((last - exact).abs().max()):.1e}")

plt.figure(figsize=(6, 3.2))
plt.plot(tokens, [n / 1e6 for n in cache], label="keys and values of softmax attention")
plt.plot(tokens, [n / 1e6 for n in kept], label="state with 8 frequencies")
plt.xlabel("tokens so far")
plt.ylabel("megabytes")
plt.legend()
plt.tight_layout()

# %%
# **Where to go from here.** :doc:`/docs/guide/performance` has times for many processors, and
# :doc:`/docs/experiments/long_sequences` models that were trained in linear time.
