"""
Convert a trained model, and keep it
====================================

You have a model that was trained with softmax attention, and you want the learned kernel in it. If
you only exchange the attention, the model forgets much of what it knows. In this tutorial you let
the new kernels imitate the old attention first, without labels.
"""

# %%
# A trained model
# ---------------
#
# A small vision transformer learns scikit-learn's handwritten digits, with softmax attention. A
# token is a patch of 2 x 2 pixels.

import copy
import tempfile

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


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(20):
    for batch in train[torch.randperm(len(train))].split(64):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Returns the share of test digits that the model names rightly."""
    return float((model(images[test]).argmax(1) == labels[test]).float().mean())


print(f"softmax: {accuracy(model):.1%}")

# %%
# Convert it
# ----------
#
# :func:`ikattn.convert` keeps all weights, and adds frequencies that are drawn at random.
# ``p=None`` leaves the magnitude of keys out, which a similarity that imitates softmax does not
# need.

converted = ikattn.convert(copy.deepcopy(model), p=None, num_frequencies=16, seed=0)
print(f"converted: {accuracy(converted):.1%}")

# %%
# Let it imitate
# --------------
#
# :func:`ikattn.calibrate` runs the model with softmax attention over inputs that you give it. Then
# it fits the frequencies of each head to the weights, and after that each layer to its output. It
# needs no labels. Here 256 images are enough.

calibrated = copy.deepcopy(converted)
batches = [(images[batch],) for batch in train[:256].split(64)]
report = ikattn.calibrate(calibrated, batches, train="attention", steps=150, output_steps=60)
print(report)
print(f"calibrated: {accuracy(calibrated):.1%}")

plt.figure(figsize=(5, 3))
models = {"softmax": model, "converted": converted, "calibrated": calibrated}
plt.bar(list(models), [accuracy(one) for one in models.values()])
plt.ylabel("accuracy on test digits")
plt.ylim(0, 1)
plt.tight_layout()

# %%
# Here the model has lost nothing. A larger model loses a little; fine-tuning then begins near where
# the model was.
#
# Keep it
# -------
#
# The frequencies are part of the ``state_dict``. To load it, make the same model and convert it
# with the same options.

path = tempfile.mkdtemp() + "/digits.pt"
torch.save(calibrated.state_dict(), path)

loaded = ikattn.convert(Classifier(), p=None, num_frequencies=16).eval()
loaded.load_state_dict(torch.load(path))
print(torch.equal(loaded(images[test]), calibrated(images[test])))

# %%
# A model of Hugging Face is saved by ``model.save_pretrained(folder)``, and loaded by
# :func:`ikattn.integrations.transformers.from_pretrained`.
#
# **Where to go from here.** :doc:`/docs/guide/calibration` has the options, and
# :doc:`/docs/experiments/pretrained` a BERT that keeps its embeddings to a cosine of 0.98.
