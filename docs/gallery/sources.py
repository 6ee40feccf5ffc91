"""
Where frequencies come from
===========================

The similarity of two tokens against their distance, for each source of frequencies before training,
in four heads. Direct frequencies are parameters. A stationary kernel has one set of them, so that
equal tokens have similarity 1. IKAN and MIKAN make frequencies by a network, from noise.
"""

import matplotlib.pyplot as plt
import torch

from ikattn.spectral import Direct, Ikan, Mikan, Stationary, kernel_profile

torch.manual_seed(0)
distances = torch.linspace(0, 16, 60)
figure, axes = plt.subplots(1, 4, figsize=(11, 2.8), sharey=True, layout="constrained")
for axis, source in zip(axes, (Direct, Stationary, Ikan, Mikan), strict=True):
    made = source(num_heads=4, head_dim=32, num_frequencies=32)
    axis.plot(distances, kernel_profile(made, distances).mT)
    axis.axvline((2 * 32) ** 0.5, color="0.7", linestyle=":")  # two random tokens
    axis.set(title=source.__name__, xlabel="distance")
axes[0].set_ylabel("similarity, s²")
