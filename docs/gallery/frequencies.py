"""
How many frequencies tell how many tokens apart
===============================================

A head that looks for one token among many must find it more similar than all others. The picture
shows the share of the weight that goes to the right token, when queries are the keys themselves,
against the number of frequencies. More tokens need more frequencies. Keys and frequencies are
random here; a model that learns both needs fewer (:doc:`/docs/experiments/recall`).
"""

import matplotlib.pyplot as plt
import torch

import ikattn

torch.manual_seed(0)
frequencies = [2, 4, 8, 16, 32, 64, 128]
plt.figure(figsize=(6, 4))
for length in (32, 128, 512, 2048):
    keys = torch.randn(1, 1, length, 64)
    shares = []
    for count in frequencies:
        w = 0.2 * torch.randn(1, 64, count)
        weights = ikattn.implicit_kernel_weights(keys, keys, w, p=None)
        shares.append(float(weights.diagonal(dim1=-2, dim2=-1).mean()))
    plt.plot(frequencies, shares, "o-", label=f"{length} tokens")
plt.xscale("log", base=2)
plt.xticks(frequencies, frequencies)
plt.xlabel("frequencies")
plt.ylabel("weight on the right token")
plt.ylim(0, 1)
plt.legend()
plt.tight_layout()
