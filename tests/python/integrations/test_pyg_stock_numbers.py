"""Layers with kernel="dot" in the place of GATConv and GATv2Conv give the numbers of PyG."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn

pytest.importorskip("torch_geometric")

from torch_geometric import EdgeIndex
from torch_geometric.explain import AttentionExplainer, Explainer
from torch_geometric.nn import GATConv, GATv2Conv
from torch_geometric.utils import to_torch_csc_tensor

N, CHANNELS, C, H = 9, 6, 4, 3
EDGE_INDEX = torch.tensor(
    [[3, 0, 6, 3, 1, 4, 2, 5, 0, 7, 7, 2], [1, 0, 5, 1, 4, 4, 3, 3, 5, 1, 8, 1]]
)
E = EDGE_INDEX.shape[1]
each_stock = pytest.mark.parametrize("stock", [GATConv, GATv2Conv], ids=lambda x: x.__name__)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head": {"heads": 1},
    "mean": {"concat": False},
    "slope 0": {"negative_slope": 0.0},
    "slope 0.7": {"negative_slope": 0.7},
    "slope 1.5": {"negative_slope": 1.5},
    "slope -0.3": {"negative_slope": -0.3},
    "edges": {"edge_dim": 3},
    "edges, loops of ones": {"edge_dim": 3, "fill_value": 1.0},
    "edges, loops of sums": {"edge_dim": 3, "fill_value": "add"},
    "edges, no loops": {"edge_dim": 3, "add_self_loops": False},
    "no loops": {"add_self_loops": False},
    "residual": {"residual": True},
    "residual of the mean": {"residual": True, "concat": False},
    "no bias": {"bias": False},
    "dropout": {"dropout": 0.6},
    "max": {"aggr": "max"},
    "mean of messages": {"aggr": "mean"},
    "backwards": {"flow": "target_to_source"},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def pair(stock: Any, channels: Any = CHANNELS, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A layer of PyG, and a copy that was converted; logits of both signs, and biases."""
    torch.manual_seed(3)
    layer = stock(channels, C, **({"heads": H} | options)).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer, ikattn.convert(copy.deepcopy(layer), "dot")


def assert_same(layer: nn.Module, ours: nn.Module, x: Any, *args: Any, **kwargs: Any) -> None:
    """Results, and gradients of nodes and parameters."""
    results, grads = [], []
    for conv in (layer, ours):
        leaves = [n.clone().requires_grad_() for n in ([x] if isinstance(x, Tensor) else x)]
        result = conv(leaves[0] if isinstance(x, Tensor) else tuple(leaves), *args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        loss = (output * normal(*output.shape)).sum()
        wanted = leaves + list(conv.parameters())
        grads.append(torch.autograd.grad(loss, wanted, allow_unused=True))
        results.append(result)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    for found, expected in zip(grads[1], grads[0], strict=True):
        if expected is None:
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@each_stock
@each_option
def test_every_option_gives_the_numbers_of_pyg(stock, options):
    layer, ours = pair(stock, **options)
    assert ours.kernel == "dot"
    attributes = normal(E, 3) if "edge_dim" in options else None
    assert_same(layer, ours, normal(N, CHANNELS), EDGE_INDEX, attributes)
    assert_same(
        layer, ours, normal(N, CHANNELS), EDGE_INDEX, attributes, return_attention_weights=True
    )


@each_stock
def test_other_forms_of_nodes_and_edges_give_the_numbers_of_pyg(stock):
    layer, ours = pair(stock)
    x, once = normal(N, CHANNELS), EDGE_INDEX.unique(dim=1)
    assert_same(layer, ours, x, EdgeIndex(EDGE_INDEX, sparse_size=(N, N)))
    assert_same(layer, ours, x, torch.empty(2, 0, dtype=torch.long))
    layer, ours = pair(stock, add_self_loops=False)
    assert_same(layer, ours, x, to_torch_csc_tensor(once, size=(N, N)).t())
    layer, ours = pair(stock, (CHANNELS, 5), residual=True, add_self_loops=False, edge_dim=1)
    assert_same(layer, ours, (x, normal(11, 5)), EDGE_INDEX, normal(E))
    layer, ours = pair(stock)
    doubles = layer.double(), ours.double()
    assert_same(*doubles, x.double(), EDGE_INDEX)


def test_targets_without_features_give_the_numbers_of_pyg():
    layer, ours = pair(GATConv, (CHANNELS, 5), add_self_loops=False)
    nodes, size = (normal(N, CHANNELS), None), (N, 10)
    torch.testing.assert_close(
        ours(nodes, EDGE_INDEX, size=size), layer(nodes, EDGE_INDEX, size=size)
    )


@each_stock
def test_dropout_keeps_the_mean_of_the_weights(stock):
    layer, ours = pair(stock, dropout=0.5)
    _, (_, wanted) = layer(normal(N, CHANNELS), EDGE_INDEX, return_attention_weights=True)
    ours.train()
    with torch.no_grad():
        drawn = [
            ours(normal(N, CHANNELS), EDGE_INDEX, return_attention_weights=True)[1][1]
            for _ in range(400)
        ]
    assert bool(((drawn[0] == 0) | torch.isclose(drawn[0], 2 * wanted)).all())
    torch.testing.assert_close(torch.stack(drawn).mean(0), wanted, rtol=0, atol=0.2)


def heard(conv: nn.Module, register: str) -> Tensor:
    """Returns the arguments that a hook of PyG hears."""
    seen: list[Tensor] = []
    handle = getattr(conv, register)(lambda *of_call: seen.append(of_call[-1]))
    conv(normal(N, CHANNELS), EDGE_INDEX)
    handle.remove()
    (result,) = seen
    return result


@each_stock
def test_who_looks_at_messages_gets_those_of_pyg(stock):
    layer, ours = pair(stock)
    for register in (
        "register_message_forward_hook",
        "register_edge_update_forward_hook",
        "register_aggregate_forward_hook",
    ):
        wanted, found = (heard(conv, register) for conv in (layer, ours))
        torch.testing.assert_close(found, wanted)
    told = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    wanted, found = (
        Explainer(conv, AttentionExplainer(), "model", told, edge_mask_type="object")(
            normal(N, CHANNELS), EDGE_INDEX
        ).edge_mask
        for conv in (layer, ours)
    )
    torch.testing.assert_close(found, wanted)


@each_stock
def test_compiled_layers_give_the_numbers_of_pyg(stock):
    layer, ours = pair(stock, add_self_loops=False)
    x = normal(N, CHANNELS)
    wanted = layer(x, EDGE_INDEX)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, EDGE_INDEX), wanted)
