"""
A kernel learns a season
========================

The values of a noisy series are predicted from the other values, by attention alone: queries and
keys are the times. Softmax attention could only prefer near times. The implicit kernel learns from
the data how similar two times are, and finds the season by itself.
"""

import copy
import math

import matplotlib.pyplot as plt
import torch

import ikattn

torch.manual_seed(0)
time = torch.linspace(0, 20, 400)
season = 2.5
values = torch.sin(2 * math.pi * time / season) + 0.3 * torch.randn(400)

kernel = ikattn.spectral.Stationary(1, 1, num_frequencies=32, initial="unit angle", seed=0)
before = copy.deepcopy(kernel)
others = ~torch.eye(400, dtype=torch.bool)  # no value may predict itself


def predicted(kernel: torch.nn.Module) -> torch.Tensor:
    """Returns the prediction of each value from the others, [400]."""
    t, y = (x.view(1, 1, 400, 1) for x in (time, values))
    w1, _ = kernel.frequencies()
    return ikattn.implicit_kernel_attention(t, t, y, w1, p=None, attn_mask=others).flatten()


optimizer = torch.optim.Adam(kernel.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
for _ in range(300):
    loss = (predicted(kernel) - values).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()

# %%
# Before training the kernel knows only near and far. The learned one has found the season: times
# that lie one, two or three seasons apart (grey lines) are alike.

distances = torch.linspace(0, 10, 401)
figure = ikattn.spectral.plot_kernel(kernel, before, distances=distances)
figure.set_size_inches(6, 3)
for n in range(5):
    figure.axes[0].axvline(n * season, color="0.85", zorder=0)

# %%
# The predictions follow the season. The noise alone makes an error of 0.3.

plt.figure(figsize=(7, 3))
plt.plot(time, values, ".", color="0.7", label="values")
for name, one in (("before", before), ("after", kernel)):
    error = float((predicted(one) - values).detach().square().mean().sqrt())
    plt.plot(time, predicted(one).detach(), label=f"{name}: error {error:.2f}")
plt.xlabel("time")
plt.legend()
plt.tight_layout()
