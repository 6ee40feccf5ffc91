"""Classification of a graph's nodes, by attention and order of the norm.

A GAT of two layers with its published settings (Velickovic et al., 2018: 8 heads of 8 channels,
ELU, then one head per class; dropout 0.6 on inputs and weights, Adam at 0.005, weight decay 5e-4),
trained on the standard Planetoid split. Only the attention of both layers differs. The model of the
epoch with the least validation loss is tested; training ends 100 epochs after it.

--data DIR holds NAME.npz, or Planetoid's files ind.NAME.x, .allx, .graph and so on. NAME.npz holds
num_features, x_indptr, x_indices, x_data (bags of words in compressed rows), y, edge_index [2, E],
train_idx, val_idx and test_idx. Rows of x are scaled to sum to 1.

    pip install 'ikattn[demo]' 'ikattn[pyg]'
    python experiments/nodes.py --data DIR --quick
    python experiments/nodes.py --data DIR --csv nodes.csv --plot nodes.png
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, GATv2Conv

import comparison
from command_line import add_options, check_options, parser_of, run_program
from comparison import Divergences, Table, describe, draw_plot, parse_order, spread, train_step
from ikattn.integrations.pyg import ImplicitKernelGATConv

HEADS, CHANNELS, DROPOUT = 8, 8, 0.6
LEARNING_RATE, WEIGHT_DECAY, PATIENCE = 0.005, 5e-4, 100
ORDERS = ["1", "1.5", "2", "3", "none"]
# attention -> options of ImplicitKernelGATConv; None: a layer of PyG
ATTENTIONS: dict[str, dict[str, Any] | None] = {
    "gat": None,
    "gatv2": None,
    "dot": {"kernel": "rbf", "p": 2.0},
    **{name: options for name, options in comparison.ATTENTIONS.items() if name != "softmax"},
}
WITHOUT_ORDER = ("gat", "gatv2", "dot")
COMPARED = (*WITHOUT_ORDER, *comparison.COMPARED[1:])  # where --attention is not given


class Graph(NamedTuple):
    x: Tensor  # [N, features], compressed rows
    y: Tensor  # [N]
    edge_index: Tensor  # [2, E]
    train: Tensor
    validation: Tensor
    test: Tensor


class Run(NamedTuple):
    data_set: str
    attention: str
    p: str
    seed: int
    accuracy: float  # of the test nodes, in percent
    validation_accuracy: float
    epochs: int
    seconds_per_epoch: float


def load(folder: Path, name: str) -> Graph:
    """Reads a graph; raises OSError or ValueError, with the file, where it cannot."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        if not (folder / f"ind.{name}.x").is_file():
            raise FileNotFoundError(f"{folder} holds neither {name}.npz nor ind.{name}.x")
        from torch_geometric.io import read_planetoid_data

        data = read_planetoid_data(str(folder), name)
        masks = (data.train_mask, data.val_mask, data.test_mask)
        split = [mask.nonzero().flatten() for mask in masks]
        return Graph(_sparse(data.x), data.y, data.edge_index, *split)
    with np.load(path) as file:
        missing = _ARRAYS - set(file)
        if missing:
            raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
        rows = np.repeat(np.arange(len(file["y"])), np.diff(file["x_indptr"]))
        x = torch.zeros(len(file["y"]), int(file["num_features"]))
        x[rows, file["x_indices"]] = torch.from_numpy(file["x_data"])
        names = ("y", "edge_index", "train_idx", "val_idx", "test_idx")
        return Graph(_sparse(x), *(torch.from_numpy(file[name]).long() for name in names))


_ARRAYS = {
    *("num_features", "x_indptr", "x_indices", "x_data", "y", "edge_index"),
    *("train_idx", "val_idx", "test_idx"),
}


def _sparse(x: Tensor) -> Tensor:
    """Rows that sum to 1. One in a hundred numbers is not zero: dense, they would take the time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return (x / x.sum(-1, keepdim=True).clamp_min(1)).to_sparse_csr()


def _dropped(x: Tensor) -> Tensor:
    values = F.dropout(x.values(), DROPOUT)
    return torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape)


class Classifier(nn.Module):
    """Two layers of attention over the edges."""

    def __init__(self, features: int, classes: int, attention: str, p: str, frequencies: int):
        super().__init__()
        options = ATTENTIONS[attention]
        make: Any = {"gat": GATConv, "gatv2": GATv2Conv}.get(attention, ImplicitKernelGATConv)
        if options is None:
            options = {}
        else:
            options = {"p": parse_order(p), "num_frequencies": frequencies} | options
        self.first = make(features, CHANNELS, HEADS, dropout=DROPOUT, **options)
        self.second = make(HEADS * CHANNELS, classes, 1, concat=False, dropout=DROPOUT, **options)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = _dropped(x) if self.training else x
        x = F.elu(self.first(x, edge_index))
        x = F.dropout(x, DROPOUT, self.training)
        logits: Tensor = self.second(x, edge_index)
        return logits


def fit(graph: Graph, data_set: str, attention: str, p: str, seed: int, options: Any) -> Run:
    """Trains one model; raises FloatingPointError where it diverges."""
    torch.manual_seed(seed)
    classes = int(graph.y.max()) + 1
    model = Classifier(graph.x.size(1), classes, attention, p, options.frequencies)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    best, found, epoch = (float("inf"),), (0.0, 0.0), 0
    begin = time.process_time()
    for epoch in range(1, options.epochs + 1):
        model.train()
        output = model(graph.x, graph.edge_index)
        loss = F.cross_entropy(output[graph.train], graph.y[graph.train])
        train_step(model, optimizer, loss, examples=len(graph.train), largest_gradient=float("inf"))
        model.eval()
        with torch.no_grad():
            output = model(graph.x, graph.edge_index)
            of_validation = F.cross_entropy(output[graph.validation], graph.y[graph.validation])
            right = (output.argmax(-1) == graph.y).double()
        if of_validation.item() < best[0]:
            best = (of_validation.item(), epoch)  # type: ignore[assignment]
            found = (
                100 * right[graph.test].mean().item(),
                100 * right[graph.validation].mean().item(),
            )
        elif epoch - best[1] >= PATIENCE:  # type: ignore[misc]
            break
    seconds = (time.process_time() - begin) / epoch
    return Run(data_set, attention, p, seed, *found, epoch, seconds)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the data sets' files")
    add("--name", default="cora", help="of the data set; default: cora")
    add("--attention", nargs="+", choices=ATTENTIONS, default=COMPARED)
    add("--p", nargs="+", default=ORDERS, help=f"orders; default: {' '.join(ORDERS)}")
    add("--seeds", type=int, default=10, help="models of each kind; default: 10")
    add("--epochs", type=int, default=1000, help="at most; default: 1000")
    add("--frequencies", type=int, default=16, help="M; default: 16")
    add("--quick", action="store_true", help="one seed, 5 epochs, order 2")
    add_options(parser, plotted="accuracies")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs, options.p = 1, 5, ["2"]
    check_options(parser, options, ["seeds", "epochs", "frequencies", "threads"])
    if options.frequencies % 2 and {"ikan", "mikan"} & set(options.attention):
        parser.error("--frequencies must be even with --attention ikan or mikan")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    try:
        graph = load(options.data, options.name)
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
        sys.exit(f"nodes.py: {options.name} cannot be read: {error}")
    for name in ("train", "validation", "test"):
        if not len(getattr(graph, name)):
            sys.exit(f"nodes.py: {options.name} has no {name} nodes")
    table = Table[Run](options.csv)
    divergences = Divergences()
    print(f"{'':22}{'test accuracy, %':<20}{'validation':<18}epochs")
    for attention in options.attention:
        for p in ["-"] if attention in WITHOUT_ORDER else options.p:
            name = describe(attention, p)
            runs = []
            for seed in range(options.seeds):
                setting = (options.name, attention, p, seed)
                run = divergences.fit(
                    f"{name}, seed {seed}", partial(fit, graph, *setting, options)
                )
                if run is not None:
                    runs.append(run)
                    table.add(run)
            if runs:
                columns = [
                    spread([run.accuracy for run in runs], 1),
                    spread([run.validation_accuracy for run in runs], 1),
                    spread([run.epochs for run in runs], 0),
                ]
                milliseconds = 1e3 * np.median([run.seconds_per_epoch for run in runs])
                print(
                    f"{name:<22}{columns[0]:<20}{columns[1]:<18}{columns[2]:<14}"
                    f"{milliseconds:.0f} ms per epoch",
                    flush=True,
                )
    if options.plot is not None and table.runs:
        draw_plot(options.plot, table.runs, "data_set", lambda run: run.accuracy, "accuracy, %")
    divergences.end()


if __name__ == "__main__":
    run_program(main)
