"""
Train with a learned kernel
===========================

Softmax attention compares a query and a key in one fixed way, exp(q·k). Implicit-kernel attention
learns how to compare them. In this tutorial you train a small vision transformer twice, and you
look at what its kernels have learned.
"""

# %%
# Digits
# ------
#
# The data come with scikit-learn: 1797 handwritten digits of 8 x 8 pixels. A token is a patch of 2
# x 2 pixels, so that an image has 16 of them.

import copy
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import ikattn

torch.set_num_threads(1)
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
labels = torch.tensor(labels)
order = torch.randperm(len(labels))
train, test = order[:1400], order[1400:]

# %%
# An ordinary model
# -----------------
#
# It is plain PyTorch, and knows nothing of ikattn.


class Classifier(nn.Module):
    """Patches of an image, a transformer, and the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, kernel_size=2, stride=2)
        self.places = nn.Parameter(0.5 * torch.randn(16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classes = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps images [N, 1, 8, 8] to logits [N, 10]."""
        tokens = self.patches(images).flatten(2).mT + self.places
        return self.classes(self.encoder(tokens).mean(1))


softmax = Classifier()

# %%
# One line puts the learned kernel into a copy with the same weights. Each head gets frequencies,
# which decide what similar means in this head.

learned = ikattn.convert(copy.deepcopy(softmax), num_frequencies=16, seed=0)
print(learned.encoder.layers[0].self_attn)

# %%
# Train both
# ----------
#
# Frequencies want smaller steps than other parameters. :func:`ikattn.parameter_groups` sees to it;
# of the softmax model, which has none, it returns ordinary groups.

before = copy.deepcopy(learned)


def fit(model: nn.Module, epochs: int = 20) -> list[float]:
    """Trains the model, and returns its accuracy on test digits after each epoch."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(ikattn.parameter_groups(model, lr=3e-3))
    accuracy = []
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = model(images[test]).argmax(1) == labels[test]
        accuracy.append(float(right.float().mean()))
    return accuracy


curves = {}
for name, model in (("softmax", softmax), ("learned kernel", learned)):
    start = time.perf_counter()
    curves[name] = fit(model)
    print(f"{name:15} {curves[name][-1]:.1%} after {time.perf_counter() - start:.0f} s")

plt.figure(figsize=(6, 3.4))
for name, accuracy in curves.items():
    plt.plot(range(1, 1 + len(accuracy)), accuracy, label=name)
plt.xlabel("epoch")
plt.ylabel("accuracy on test digits")
plt.legend()
plt.tight_layout()

# %%
# Both learn the digits. There are 397 test digits, so that a difference of one per cent is chance.
# :doc:`/docs/experiments/README` has experiments that compare the two with care.
#
# What did the kernels learn?
# ---------------------------
#
# :func:`ikattn.spectral.plot_kernel` draws, for each head, the similarity of two tokens against the
# distance between them. Thin lines are the kernels before training.

ikattn.spectral.plot_kernel(
    learned.encoder.layers[0].self_attn, before=before.encoder.layers[0].self_attn
)

# %%
# The heads start alike, and a few of them become a little narrower. Most of the learning is in the
# projections, which move tokens to where the kernel wants them. :doc:`/docs/gallery/learned_kernel`
# has data that ask for another kernel, and a kernel that becomes it.

# %%
# **Where to go from here.** :doc:`/docs/guide/drop_in` has all options of the module,
# :doc:`/docs/guide/spectral` where frequencies may come from. The next tutorial begins with a model
# that is trained already.
