"""
Where a query looks: kernels in the plane
=========================================

The picture shows one query (the cross) and all keys of a plane. The colour is the weight that a key
would get, before normalisation. Softmax is a similarity, the RBF kernel, times the magnitude of the
key: it prefers long keys in the direction of the query. The implicit kernel may have any similarity
that frequencies can make, with or without the magnitude. Here four frequencies are random.
"""

import matplotlib.pyplot as plt
import torch

import ikattn

torch.manual_seed(2)
line = torch.linspace(-2, 2, 121)
keys = torch.cartesian_prod(line, line).view(1, 1, -1, 2)
query = torch.tensor([1.0, 0.5]).view(1, 1, 1, 2)
w1, w2 = (0.25 * torch.randn(1, 2, 4) for _ in range(2))
options = {
    "RBF, no magnitude": {"kernel": "rbf", "p": None},
    "RBF, p = 2: softmax": {"kernel": "rbf", "p": 2.0},
    "implicit, no magnitude": {"kernel": "implicit", "p": None, "w1": w1, "w2": w2},
    "implicit, p = 2": {"kernel": "implicit", "p": 2.0, "w1": w1, "w2": w2},
}

figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), sharey=True, layout="constrained")
for axis, (title, own) in zip(axes, options.items(), strict=True):
    similarity, magnitude = ikattn.ops.similarity_and_magnitude(query, keys, **own)
    weight = (similarity[0, 0, 0] * magnitude[0, 0]).view(121, 121).mT
    axis.imshow(weight / weight.max(), origin="lower", extent=(-2, 2, -2, 2), cmap="viridis")
    axis.plot(*query.flatten(), "x", color="white", markersize=9)
    axis.set_title(title)
