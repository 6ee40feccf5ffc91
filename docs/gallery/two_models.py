"""
Two models compared
===================

:func:`ikattn.explain.compare` gives the same inputs to two models, and tells how far apart their
maps are. Here one model is trained and the other one is the same before training: the distance of
attention weights, and of contributions, in each layer.
"""

import copy

import matplotlib.pyplot as plt
import torch

import ikattn

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
before = copy.deepcopy(model).eval()

# %%
# The task: the first token asks for another token by its number, and the model gives back its
# vector.

vectors = torch.randn(12, 32)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sequences [64, 12, 32], and the vectors that they ask for."""
    tokens = torch.randn(64, 12, 32) + vectors
    asked = torch.randint(1, 12, (64,))
    tokens[:, 0] = vectors[asked]
    return tokens, tokens[torch.arange(64), asked]


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(300):
    tokens, wanted = batch()
    loss = (model(tokens)[:, 0] - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

found = ikattn.explain.compare(before, model.eval(), batch()[0], maps=("weights", "summed"))
print(found)

# %%
# A total variation of 0 means equal rows, and 1 rows that share nothing.

figure = plt.figure(figsize=(6, 3.4))
names = list(found.distances)
for shift, map_ in ((-0.2, "weights"), (0.2, "summed")):
    heights = [float(found[name][map_].total_variation.mean()) for name in names]
    plt.bar([n + shift for n in range(len(names))], heights, 0.4, label=map_)
plt.xticks(range(len(names)), [f"layer {n}" for n in range(len(names))])
plt.ylabel("total variation, before and after")
plt.legend()
plt.tight_layout()
