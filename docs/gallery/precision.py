"""
How exact a call is
===================

The largest error of a call against the formula in float64, relative to the largest output, by data
type and length. Linear time, on long sequences, is as exact as quadratic time.
"""

import matplotlib.pyplot as plt
import torch

import ikattn

torch.manual_seed(0)
lengths = [64, 256, 1024, 4096]
types = (torch.float32, torch.float16, torch.bfloat16)
errors = {dtype: [] for dtype in types}
w1, w2 = (0.05 * torch.randn(2, 32, 16) for _ in range(2))
for length in lengths:
    tensors = [*torch.randn(3, 1, 2, length, 32), w1, w2]
    for dtype in types:
        rounded = [x.to(dtype) for x in tensors]  # the error is that of the call alone
        exact = ikattn.reference.implicit_kernel_attention(*(x.double() for x in rounded))
        found = ikattn.implicit_kernel_attention(*rounded)
        errors[dtype].append(float((found - exact).abs().max() / exact.abs().max()))

plt.figure(figsize=(6, 3.6))
for dtype in types:
    plt.loglog(lengths, errors[dtype], "o-", label=str(dtype).removeprefix("torch."))
    plt.axhline(torch.finfo(dtype).eps, color="0.8", linewidth=1, zorder=0)
plt.xticks(lengths, lengths)
plt.minorticks_off()
plt.xlabel("tokens")
plt.ylabel("largest relative error")
plt.legend()
plt.tight_layout()

# %%
# The grey lines are the distance of 1 from the next number of each type.
