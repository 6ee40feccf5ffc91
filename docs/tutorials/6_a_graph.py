"""
Attention on a graph
====================

In a graph attention network, every node takes information from its neighbours. In this tutorial you
train such a network with PyTorch Geometric, you give it the learned kernel, and you look at what
its edges move.
"""

# %%
# A karate club
# -------------
#
# The graph comes with PyTorch Geometric: 34 members of a karate club and their friendships. After a
# quarrel the club fell apart into four groups. You know the group of one member of each, and the
# network is to find the groups of the others.

import matplotlib.pyplot as plt
import networkx
import torch
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GAT
from torch_geometric.utils import to_networkx

import ikattn

torch.manual_seed(0)
club = KarateClub()[0]
print(club)

# %%
# A network
# ---------
#
# It is PyTorch Geometric's own. One line puts the learned kernel into its layers.

model = GAT(club.num_features, 16, num_layers=2, out_channels=4, heads=4)
ikattn.convert(model, num_frequencies=8, seed=0)
print(model.convs[0])

# %%
# Train it
# --------

optimizer = torch.optim.AdamW(ikattn.parameter_groups(model, lr=0.01))
for _ in range(100):
    output = model(club.x, club.edge_index)
    loss = torch.nn.functional.cross_entropy(output[club.train_mask], club.y[club.train_mask])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad(), ikattn.record(model) as recording:
    found = model(club.x, club.edge_index).argmax(1)
print(f"{int((found == club.y).sum())} of {len(found)} members are in their group")

# %%
# Look at one member
# ------------------
#
# :func:`ikattn.record` took the maps of both layers during the last call. For each edge it knows
# the weight, and the length of what the edge moves. ``into`` lists the sources of a node, the
# largest first.

print(list(recording.edges))
maps = recording.edges["convs.0"]
for source, moved in maps.into(8)[:5]:
    print(f"member {source} gives {moved:.2f}")

# %%
# Look at all edges
# -----------------
#
# A colour is a group, and the width of an edge is what it moves. Most edges within a group move
# more than edges between groups.

graph = to_networkx(club, to_undirected=True)
places = networkx.spring_layout(graph, seed=3)
widths = {}
for source, target, moved in zip(
    maps.source.tolist(), maps.target.tolist(), maps.summed.tolist(), strict=True
):
    pair = (min(source, target), max(source, target))
    widths[pair] = max(widths.get(pair, 0.0), moved)

plt.figure(figsize=(7, 5))
networkx.draw_networkx_nodes(
    graph, places, node_color=club.y, cmap="Set2", node_size=260, edgecolors="0.3"
)
networkx.draw_networkx_labels(graph, places, font_size=8)
networkx.draw_networkx_edges(
    graph, places, width=[3 * widths[min(e), max(e)] for e in graph.edges], alpha=0.5
)
plt.axis("off")
plt.tight_layout()

# %%
# And count it: the mean that an edge moves, within groups and between them.

is_loop = maps.source == maps.target
is_within = club.y[maps.source] == club.y[maps.target]
print(f"within a group:  {float(maps.summed[is_within & ~is_loop].mean()):.3f}")
print(f"between groups:  {float(maps.summed[~is_within].mean()):.3f}")

# %%
# **Where to go from here.** :doc:`/docs/guide/graphs` has the operators behind this, layers, other
# kernels and files. :doc:`/docs/experiments/nodes` compares kernels on a larger graph, where none
# of them was better than the graph attention network's own.
