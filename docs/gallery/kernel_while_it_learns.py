"""
A kernel while it learns
========================

The picture shows the kernel of :doc:`/docs/gallery/learned_kernel` during its training: a column is
a step, and bright is similar. At first only near times are alike; then the season appears.
"""

import math

import matplotlib.pyplot as plt
import torch

import ikattn

torch.manual_seed(0)
time = torch.linspace(0, 20, 400)
values = torch.sin(2 * math.pi * time / 2.5) + 0.3 * torch.randn(400)
t, y = (x.view(1, 1, 400, 1) for x in (time, values))
others = ~torch.eye(400, dtype=torch.bool)  # no value may predict itself

kernel = ikattn.spectral.Stationary(1, 1, num_frequencies=32, initial="unit angle", seed=0)
optimizer = torch.optim.Adam(kernel.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
distances = torch.linspace(0, 10, 200)
columns, errors = [], []
for _ in range(300):
    columns.append(ikattn.spectral.kernel_profile(kernel, distances)[0])
    w1, _ = kernel.frequencies()
    found = ikattn.implicit_kernel_attention(t, t, y, w1, p=None, attn_mask=others).flatten()
    loss = (found - values).square().mean()
    errors.append(float(loss.detach().sqrt()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()

figure, (above, below) = plt.subplots(
    2, 1, figsize=(7, 5), sharex=True, height_ratios=(1, 3), layout="constrained"
)
above.plot(errors)
above.set_ylabel("error")
picture = below.imshow(
    torch.stack(columns, 1), origin="lower", aspect="auto", extent=(0, 300, 0, 10), cmap="magma"
)
below.set(xlabel="step", ylabel="distance of two times")
figure.colorbar(picture, ax=below, label="similarity, s²")
