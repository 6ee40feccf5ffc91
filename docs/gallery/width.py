"""
How wide a kernel starts
========================

The similarity of two tokens against their distance, for frequencies as they are drawn at first. The
dotted line is the distance of two random tokens. With the paper's frequencies the width depends on
the number of heads and frequencies; with ``initial="unit angle"`` it fits every head size.
"""

import matplotlib.pyplot as plt
import torch

from ikattn.spectral import Direct, kernel_profile

torch.manual_seed(0)
sizes = (8, 32, 128)
figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
for axis, size in zip(axes, sizes, strict=True):
    usual = (2 * size) ** 0.5
    distances = torch.linspace(0, 2 * usual, 60)
    for initial in ("paper", "unit angle"):
        source = Direct(8, size, num_frequencies=64, initial=initial)
        axis.plot(distances, kernel_profile(source, distances).mean(0), label=initial)
    axis.axvline(usual, color="0.7", linestyle=":")
    axis.set(title=f"head size {size}", xlabel="distance")
axes[0].set_ylabel("similarity, s²")
axes[0].legend()
