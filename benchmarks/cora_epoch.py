"""An epoch of a GAT on Cora, by the attention of its layers: a training step and an evaluation.

The model, its settings and its data are those of experiments/nodes.py, but the words are dense, as
PyG loads them. Attentions take turns; each time is the median of the rounds, in CPU time of one
thread.

python benchmarks/cora_epoch.py --data DIR            # DIR holds cora.npz, or Planetoid's files
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
import nodes

KINDS = {"GATConv": "gat", "dot": "dot", "rbf": "rbf", "implicit kernel": "direct"}


def steps(
    graph: nodes.Graph, x: Tensor, attention: str, frequencies: int
) -> list[Callable[[], None]]:
    """A training step and an evaluation of a new model."""
    torch.manual_seed(0)
    classes = int(graph.y.max()) + 1
    model = nodes.Classifier(x.size(1), classes, attention, "2", frequencies)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=nodes.LEARNING_RATE, weight_decay=nodes.WEIGHT_DECAY
    )

    def train() -> None:
        model.train()
        optimizer.zero_grad()
        output = model(x, graph.edge_index)
        F.cross_entropy(output[graph.train], graph.y[graph.train]).backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        output = model(x, graph.edge_index)
        F.cross_entropy(output[graph.validation], graph.y[graph.validation]).item()

    return [train, evaluate]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of cora.npz")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--frequencies", type=int, default=16, help="M; default: 16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    graph = nodes.load(options.data, "cora")
    x = graph.x.to_dense()
    nodes._dropped = lambda x: F.dropout(x, nodes.DROPOUT)
    models = {name: steps(graph, x, kind, options.frequencies) for name, kind in KINDS.items()}
    times: dict[str, list[list[float]]] = {name: [[], []] for name in models}
    for turn in range(options.rounds + 2):  # the first two warm up
        for name, parts in models.items():
            for part, taken in zip(parts, times[name], strict=True):
                begin = time.thread_time()
                part()
                if turn >= 2:
                    taken.append(time.thread_time() - begin)
    base = 0.0
    for name, taken in times.items():
        train, evaluate = (1e3 * statistics.median(part) for part in taken)
        base = base or train + evaluate
        print(
            f"{name:<16} training step {train:.1f} ms, evaluation {evaluate:.1f} ms, epoch "
            f"{(train + evaluate) / base:.2f} of GATConv's"
        )


if __name__ == "__main__":
    main()
