"""
Patches of an image
===================

A vision transformer sees an image as patches. Train one on digits, and ask which patches made its
answer: orange patches speak for the digit, blue ones against it.
"""

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


class Classifier(nn.Module):
    """Patches of an image, a transformer, and the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, kernel_size=2, stride=1)
        self.places = nn.Parameter(0.5 * torch.randn(49, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classes = nn.Linear(32, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens [N, 49, 32] to logits [N, 10]."""
        return self.classes(self.encoder(tokens).mean(1))

    def tokens(self, images: torch.Tensor) -> torch.Tensor:
        """Maps images [N, 1, 8, 8] to tokens."""
        return self.patches(images).flatten(2).mT + self.places


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(6):
    for batch in torch.randperm(1500).split(64):
        loss = nn.functional.cross_entropy(model(model.tokens(images[batch])), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()

# %%
# Why this digit, and why not another one? The scores of all patches, and of the biases, add up to
# the logit of the digit.

shown = [1500 + int((labels[1500:] == digit).nonzero()[0]) for digit in range(10)]
with torch.no_grad():
    tokens = model.tokens(images[shown])
found = ikattn.attribute(model, tokens, labels[shown])
scores = ikattn.explain.patch_maps(found.scores, grid=(7, 7), specials=0)

figure, axes = plt.subplots(2, 10, figsize=(10, 2.4), layout="constrained")
largest = float(scores.abs().quantile(0.98))
for column, (image, patches) in enumerate(zip(images[shown, 0], scores, strict=True)):
    axes[0, column].imshow(-image, cmap="gray")
    axes[1, column].imshow(patches, cmap="PuOr_r", vmin=-largest, vmax=largest)
for axis in axes.flat:
    axis.axis("off")
