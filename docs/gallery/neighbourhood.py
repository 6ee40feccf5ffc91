"""
A graph's neighbourhood
=======================

The picture shows what one node of a graph gets from its neighbours, and from itself. The width of
an edge is the length of what it moves. ``maps.plot`` draws it.
"""

import tempfile

import matplotlib.pyplot as plt
import torch
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GAT

import ikattn

torch.manual_seed(0)
club = KarateClub()[0]
model = GAT(club.num_features, 16, num_layers=2, out_channels=4, heads=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(100):
    output = model(club.x, club.edge_index)
    loss = torch.nn.functional.cross_entropy(output[club.train_mask], club.y[club.train_mask])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad(), ikattn.record(model.eval()) as recording:
    model(club.x, club.edge_index)
maps = recording.edges["convs.1"]
path = tempfile.mkdtemp() + "/node.png"
maps.plot(path, node=8)

plt.figure(figsize=(6, 5))
plt.imshow(plt.imread(path))
plt.axis("off")
plt.tight_layout(pad=0)
