"""Contributions along the edges of a graph: the function, recordings, files and pictures."""

from __future__ import annotations

import csv
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import ikattn
from ikattn.maps.edges import EdgeMaps


def edges(count: int = 40, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(count, 3, generator=generator, dtype=torch.float64).to(dtype)
    vectors = torch.randn(6, 3, 5, generator=generator, dtype=torch.float64).to(dtype)
    return weights, vectors, torch.randint(6, (count,), generator=generator)


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_contributions_are_norms_of_weighted_vectors(concat, dtype):
    weights, vectors, source = edges(dtype=dtype)
    found = ikattn.maps.edge_contributions(weights, vectors, source, concat=concat)
    moved = weights.double().unsqueeze(-1) * vectors.double()[source]
    together = moved.flatten(1) if concat else moved.sum(1)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 0.0}
    assert found.summed.dtype == dtype
    torch.testing.assert_close(found.per_head.double(), moved.norm(dim=-1), **tolerance)
    torch.testing.assert_close(found.summed.double(), together.norm(dim=-1), **tolerance)


def test_heads_that_cancel_are_small_and_not_nan():
    vectors = torch.randn(1, 1, 64).repeat(1, 2, 1)
    vectors[:, 1] *= -1
    weights = torch.tensor([[0.5, 0.5], [0.5, 0.5 * (1 + 2e-7)]], requires_grad=True)
    maps = ikattn.maps.edge_contributions(weights, vectors, torch.zeros(2, dtype=torch.int64))
    assert maps.summed[0] == 0
    assert 0 < maps.summed[1] < 1e-6 * maps.per_head[1, 0] * 2
    maps.summed.sum().backward()
    assert bool(weights.grad.isfinite().all())


@pytest.mark.parametrize("concat", [False, True])
def test_nan_shows_and_half_precision_does_not_overflow(concat):
    weights, vectors, source = edges(8)
    weights[2, 1] = torch.nan
    maps = ikattn.maps.edge_contributions(weights, vectors, source, concat=concat)
    assert maps.summed.isnan().nonzero().flatten().tolist() == [2]
    large = torch.full((1, 1, 4), 6e4, dtype=torch.float16)
    weights = torch.full((1, 1), 1e-4, dtype=torch.float16)
    maps = ikattn.maps.edge_contributions(weights, large, torch.zeros(1).long(), concat=concat)
    wanted = torch.full((1,), 12.0, dtype=torch.float16)
    torch.testing.assert_close(maps.per_head[0], wanted, rtol=1e-2, atol=0)
    torch.testing.assert_close(maps.summed, wanted, rtol=1e-2, atol=0)


@pytest.mark.parametrize("concat", [False, True])
def test_contributions_have_gradients(concat):
    weights, vectors, source = edges(7)

    def call(weights: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        return tuple(ikattn.maps.edge_contributions(weights, vectors, source, concat=concat))

    assert gradcheck(call, (weights.requires_grad_(), vectors.requires_grad_()))


def test_contributions_of_no_edges():
    weights, vectors, _ = edges(0)
    maps = ikattn.maps.edge_contributions(weights, vectors, torch.zeros(0, dtype=torch.int64))
    assert maps.per_head.shape == (0, 3)
    assert maps.summed.shape == (0,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weights": torch.rand(40)}, ValueError, r"weights must have shape \[E, H\]"),
        ({"vectors": torch.rand(6, 2, 5)}, ValueError, r"got \[40, 3\] and \[6, 2, 5\]"),
        ({"weights": torch.ones(40, 3).long()}, TypeError, "must be floating point"),
        ({"source": torch.zeros(40)}, TypeError, r"source must be int64 or int32, got torch\.f"),
        ({"source": torch.zeros(4).long()}, ValueError, r"source must have shape \[E\] = \[40\]"),
        ({"source": torch.full((40,), 6)}, IndexError, "must be in"),
        ({"source": torch.full((40,), -1)}, IndexError, r"source must be in \[0, 6\), got -1"),
    ],
)
def test_errors_of_contributions_name_the_argument(change, error, message):
    arguments: dict[str, Any] = dict(zip(("weights", "vectors", "source"), edges(), strict=True))
    with pytest.raises(error, match=message):
        ikattn.maps.edge_contributions(**(arguments | change))


# Recordings

pyg = pytest.importorskip("torch_geometric.nn")

N, CHANNELS, C, H = 7, 5, 4, 2
EDGE_INDEX = torch.tensor([[3, 0, 6, 3, 1, 4, 2, 5, 0], [1, 0, 5, 1, 4, 4, 3, 3, 5]])


def layer_kinds() -> list[type[nn.Module]]:
    from ikattn.integrations import pyg as ours

    return [
        pyg.GATConv,
        pyg.GATv2Conv,
        pyg.TransformerConv,
        ours.ImplicitKernelGATConv,
        ours.ImplicitKernelGATv2Conv,
        ours.ImplicitKernelTransformerConv,
    ]


@pytest.mark.parametrize("kind", layer_kinds(), ids=lambda x: x.__name__)
@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_a_recording_holds_the_norms_of_what_each_edge_moves(kind, concat, edge_dim):
    conv = kind(CHANNELS, C, H, concat=concat, edge_dim=edge_dim).eval()
    x, attributes = torch.randn(N, CHANNELS), None
    if edge_dim is not None:
        attributes = torch.randn(EDGE_INDEX.shape[1], edge_dim)
    wanted, (of_edges, alpha) = conv(x, EDGE_INDEX, attributes, return_attention_weights=True)
    with ikattn.record(conv) as recording:
        output = conv(x, EDGE_INDEX, attributes)
    torch.testing.assert_close(output, wanted)
    maps = recording.edges[""]
    assert torch.equal(torch.stack([maps.source, maps.target]), of_edges)
    torch.testing.assert_close(maps.weights, alpha)
    if hasattr(conv, "lin_value"):
        vectors = conv.lin_value(x).view(-1, H, C)[of_edges[0]]
        if attributes is not None:
            vectors = vectors + conv.lin_edge(attributes).view(-1, H, C)
    else:
        vectors = getattr(conv, "lin", None) or conv.lin_l
        vectors = vectors(x).view(-1, H, C)[of_edges[0]]
    found = ikattn.maps.edge_contributions(
        alpha, vectors if concat else vectors / H, torch.arange(len(alpha)), concat=concat
    )
    torch.testing.assert_close(maps.per_head, found.per_head)
    torch.testing.assert_close(maps.summed, found.summed)
    assert maps.num_targets == N
    assert not maps.summed.requires_grad


def test_edges_that_the_caller_fills_again_are_recorded_as_they_were():
    conv, edge_index = pyg.TransformerConv(CHANNELS, C, H).eval(), EDGE_INDEX.clone()
    with ikattn.record(conv, to_cpu=False) as recording:
        conv(torch.randn(N, CHANNELS), edge_index)
    edge_index.zero_()
    maps = recording.edges[""]
    assert torch.equal(torch.stack([maps.source, maps.target]), EDGE_INDEX)


def test_calls_layers_and_other_attention_are_kept_apart():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = pyg.GATConv(8, 4, 2)
            self.second = pyg.GATv2Conv(8, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(self.first(x, EDGE_INDEX), EDGE_INDEX)
            return self.attention(*3 * [self.second(x, EDGE_INDEX).unsqueeze(0)])[0]

    model = Net().eval()
    with ikattn.record(model) as recording:
        for _ in range(2):
            model(torch.randn(N, 8))
        with pytest.raises(RuntimeError):
            model(torch.randn(N, 9))
        model.second(torch.randn(N, 8), EDGE_INDEX)
    assert [list(call) for call in recording.graphs] == [
        ["first", "first#2", "second"],
        ["first", "first#2", "second"],
        ["second"],
    ]
    assert recording.names == ["attention"]
    with pytest.raises(LookupError, match="3 forward calls over a graph"):
        _ = recording.edges
    assert not model.first._message_forward_hooks
    with ikattn.record(model, layers="first") as recording:
        model(torch.randn(N, 8))
    assert list(recording.edges) == ["first", "first#2"]
    assert recording.names == []


@pytest.mark.parametrize("aggr", ["mean", "max", "min", "median", "softmax", "std"])
def test_messages_that_are_not_summed_are_refused(aggr):
    conv = pyg.TransformerConv(8, 4, heads=2, aggr=aggr, root_weight=False)
    first_has_one_message = torch.tensor([[3, 0, 2], [0, 1, 1]])
    message = f"aggr='{aggr}'.* does not add up"
    for edge_index in (first_has_one_message, first_has_one_message.flip(1)):
        with ikattn.record(conv), pytest.raises(RuntimeError, match=message):
            conv(torch.randn(4, 8), edge_index)


def test_ctrl_c_loses_no_later_call_and_results_may_be_none():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.GATConv(8, 4)
            self.stops = False

        def forward(self, x: Tensor) -> None:
            self.conv(x, EDGE_INDEX)
            if self.stops:
                raise KeyboardInterrupt

    model = Net()
    x = torch.randn(N, 8)
    with ikattn.record(model) as recording:
        model(x)
        model.stops = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.conv(x, EDGE_INDEX)
        model.stops = False
        model(x)
    assert [list(call) for call in recording.graphs] == [["conv"]] * 3


@pytest.mark.parametrize("kind", layer_kinds(), ids=lambda x: x.__name__)
def test_threads_get_the_maps_of_their_own_graphs(kind):
    conv = kind(CHANNELS, C, H).eval()
    graphs = [torch.randint(N, (2, 20 + k)) for k in range(3)]
    inputs = [torch.randn(N, CHANNELS) for _ in graphs]
    wanted = []
    for x, graph in zip(inputs, graphs, strict=True):
        with ikattn.record(conv) as alone:
            conv(x, graph)
        wanted.append(alone.edges[""])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ikattn.record(conv) as recording, ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(conv, inputs[k % 3], graphs[k % 3]) for k in range(60)]
            assert all(call.result() is not None for call in calls)
    finally:
        sys.setswitchinterval(before)
    assert len(recording.graphs) == 60
    for maps in (call[""] for call in recording.graphs):
        (own,) = [
            w
            for w in wanted
            if torch.equal(w.source, maps.source) and torch.equal(w.target, maps.target)
        ]
        torch.testing.assert_close(maps.weights, own.weights)
        torch.testing.assert_close(maps.summed, own.summed)


def test_on_layer_is_refused_for_graphs():
    with (
        pytest.raises(ValueError, match="on_layer is not called for layers that attend over a gr"),
        ikattn.record(pyg.GATConv(8, 4), on_layer=lambda *_: None),
    ):
        pass


def recorded() -> EdgeMaps:
    torch.manual_seed(0)
    conv = pyg.GATConv(CHANNELS, C, H).eval()
    with ikattn.record(conv) as recording:
        conv(torch.randn(N, CHANNELS), EDGE_INDEX)
    return recording.edges[""]


def test_files_hold_every_edge(tmp_path: Path):
    networkx = pytest.importorskip("networkx")
    maps = recorded()
    maps.save(tmp_path / "maps.csv")
    with (tmp_path / "maps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(maps.source)
    assert [int(row["source"]) for row in rows] == maps.source.tolist()
    np.testing.assert_allclose([float(row["per_head_1"]) for row in rows], maps.per_head[:, 1])
    maps.save(tmp_path / "maps.npz")
    with np.load(tmp_path / "maps.npz") as arrays:
        assert set(arrays) == {"source", "target", "num_targets", "weights", "per_head", "summed"}
        np.testing.assert_array_equal(arrays["summed"], maps.summed)
        np.testing.assert_array_equal(arrays["target"], maps.target)
    maps.save(tmp_path / "maps.graphml")
    graph = networkx.read_graphml(tmp_path / "maps.graphml", force_multigraph=True)
    assert graph.number_of_edges() == len(maps.source)
    summed = sorted(data["summed"] for *_, data in graph.edges(data=True))
    np.testing.assert_allclose(summed, sorted(maps.summed.tolist()), rtol=1e-6)
    with pytest.raises(ValueError, match=r"path must end in \.csv, \.npz or \.graphml"):
        maps.save(tmp_path / "maps.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "maps.csv",
        "maps.graphml",
        "maps.npz",
    ]


def test_the_sources_of_a_node_come_largest_first():
    maps = recorded()
    found = maps.into(3)
    assert {j for j, _ in found} == {2, 5, 3}
    assert [value for _, value in found] == sorted((v for _, v in found), reverse=True)
    with pytest.raises(IndexError, match=r"node must be in \[0, 7\), got 7"):
        maps.into(7)


@pytest.mark.parametrize("name", ["star.png", "star.svg"])
def test_a_picture_shows_a_node_and_its_sources(tmp_path: Path, name: str):
    pytest.importorskip("matplotlib")
    recorded().plot(tmp_path / name, 3, labels={2: "two"}, largest=2)
    assert (tmp_path / name).stat().st_size > 5_000
    if name.endswith("svg"):
        text = (tmp_path / name).read_text()
        assert "two" in text
        assert "the largest 2 of 3 edges" in text
    with pytest.raises(ValueError, match="path must end in"):
        recorded().plot(tmp_path / "star.gif", 3)


def test_large_graphs_of_32_bit_indices_have_an_explanation():
    edge_index = torch.tensor([[59_999], [59_998]], dtype=torch.int32)
    conv = pyg.TransformerConv(4, 3)
    with ikattn.record(conv) as recording:
        conv(torch.randn(60_000, 4), edge_index)
    maps = recording.edges[""]
    assert maps.source.dtype == torch.int64
    assert torch.equal(maps.explanation(edge_index).edge_mask, maps.summed)


def test_an_explanation_has_a_mask_for_the_given_edges():
    maps = recorded()
    explanation = maps.explanation(EDGE_INDEX, x=torch.ones(N, 1))
    assert explanation.x.shape == (N, 1)
    kept = EDGE_INDEX[0] != EDGE_INDEX[1]
    # self loops of the layer come after the other edges, in the order of nodes
    wanted = torch.zeros(EDGE_INDEX.shape[1])
    wanted[kept] = maps.summed[: int(kept.sum())]
    for e in (~kept).nonzero().flatten().tolist():
        wanted[e] = maps.summed[int(kept.sum()) + int(EDGE_INDEX[0, e])]
    torch.testing.assert_close(explanation.edge_mask, wanted)
    reverse = maps.explanation(EDGE_INDEX.flip(0), flow="target_to_source")
    torch.testing.assert_close(reverse.edge_mask, wanted)
    with pytest.raises(ValueError, match="flow must be"):
        maps.explanation(EDGE_INDEX, flow="both")
    other = maps.explanation(torch.tensor([[0], [1]]))
    assert other.edge_mask.tolist() == [0]
