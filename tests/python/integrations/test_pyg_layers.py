"""PyTorch Geometric's attention layers with other kernels, by hand and within PyG's own tools."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn

pytest.importorskip("torch_geometric")

from torch_geometric import EdgeIndex
from torch_geometric.data import HeteroData
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv, to_hetero
from torch_geometric.utils import to_torch_csc_tensor

from ikattn.integrations import pyg

LAYERS: dict[type[nn.Module], Any] = {
    GATConv: pyg.ImplicitKernelGATConv,
    GATv2Conv: pyg.ImplicitKernelGATv2Conv,
    TransformerConv: pyg.ImplicitKernelTransformerConv,
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=lambda x: x.__name__)
each_pair = pytest.mark.parametrize(
    ("stock", "layer"), LAYERS.items(), ids=[x.__name__ for x in LAYERS]
)

N, CHANNELS, C, H = 7, 5, 4, 2
EDGE_INDEX = torch.tensor([[3, 0, 6, 3, 1, 4, 2, 5, 0], [1, 0, 5, 1, 4, 4, 3, 3, 5]])
E = EDGE_INDEX.shape[1]


def nodes(count: int = N, channels: int = CHANNELS) -> Tensor:
    return torch.randn(count, channels, generator=torch.Generator().manual_seed(count))


def without_loops(layer: type[nn.Module]) -> dict[str, Any]:
    return {} if layer is LAYERS[TransformerConv] else {"add_self_loops": False}


def by_messages(conv: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The result where somebody looks at the messages."""
    seen: list[Any] = []
    handle = conv.register_message_forward_hook(lambda *of_call: seen.append(of_call))
    result = conv(*args, **kwargs)
    handle.remove()
    assert len(seen) == 1
    return result


def test_gat_computes_the_gat_form_with_self_loops():
    conv = pyg.ImplicitKernelGATConv(CHANNELS, C, H, residual=True).eval()
    x = nodes()
    loops = torch.arange(N)
    kept = EDGE_INDEX[:, EDGE_INDEX[0] != EDGE_INDEX[1]]
    edge_index = torch.cat([kept, torch.stack([loops, loops])], 1)
    z = conv.lin(x).view(-1, H, C)
    w1, w2 = conv.spectral.frequencies()
    assert w1.shape == (H, 2 * C, 16)
    output, weights = ikattn.ops.gat_edge_attention(
        torch.cat([conv.att_dst, conv.att_src], -1)[0],
        z,
        z,
        z,
        ikattn.ops.Edges.from_coo(*edge_index, N),
        w1,
        w2,
        return_weights=True,
    )
    found, (of_edges, found_weights) = conv(x, EDGE_INDEX, return_attention_weights=True)
    torch.testing.assert_close(found, output.flatten(1) + conv.res(x) + conv.bias)
    torch.testing.assert_close(found_weights, weights)
    assert torch.equal(of_edges, edge_index)


@each_layer
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_messages_add_up_to_what_the_operator_gives(layer, edge_dim):
    conv = layer(CHANNELS, C, H, edge_dim=edge_dim).double()
    attributes = None if edge_dim is None else torch.randn(E, 3).double()
    x = nodes().double().requires_grad_()
    fused = conv(x, EDGE_INDEX, attributes)
    looked_at = by_messages(conv, x, EDGE_INDEX, attributes)
    torch.testing.assert_close(fused, looked_at)
    inputs = [x, *(p for p in conv.parameters() if p.requires_grad)]
    grads = (
        torch.autograd.grad(output.square().sum(), inputs, allow_unused=True)
        for output in (fused, looked_at)
    )
    torch.testing.assert_close(*grads)


@each_layer
def test_every_form_of_edges_gives_the_same(layer):
    conv = layer(CHANNELS, C, H)
    x = nodes()
    once = EDGE_INDEX.unique(dim=1)  # a sparse tensor has no edge twice
    torch.testing.assert_close(conv(x, to_torch_csc_tensor(once, size=(N, N)).t()), conv(x, once))
    wanted = conv(x, EDGE_INDEX)
    given = EdgeIndex(EDGE_INDEX, sparse_size=(N, N))
    for edges in (given, given.sort_by("col").values, EDGE_INDEX[:, torch.randperm(E)]):
        torch.testing.assert_close(conv(x, edges), wanted)
    backwards = layer(CHANNELS, C, H, flow="target_to_source")
    backwards.load_state_dict(conv.state_dict())
    torch.testing.assert_close(backwards(x, EDGE_INDEX.flip(0)), wanted)
    torch.testing.assert_close(by_messages(backwards, x, EDGE_INDEX.flip(0)), wanted)


@each_layer
def test_values_of_a_sparse_tensor_are_features_of_its_edges(layer):
    conv = layer(CHANNELS, C, H, edge_dim=1, **without_loops(layer))
    x, once = nodes(), EDGE_INDEX.unique(dim=1)
    values = torch.rand(once.shape[1])
    adjacency = torch.sparse_coo_tensor(once.flip(0), values, (N, N)).coalesce().to_sparse_csr()
    found = conv(x, adjacency)
    torch.testing.assert_close(found, conv(x, once, values.unsqueeze(1)))
    assert not torch.allclose(found, conv(x, once, torch.zeros(len(values), 1)))


@each_layer
def test_sources_and_targets_may_be_other_nodes(layer):
    conv = layer((CHANNELS, 3), C, H, **without_loops(layer))
    sources, targets = nodes(), nodes(9, 3)  # targets 7 and 8 have no edges
    output = conv((sources, targets), EDGE_INDEX)
    assert output.shape == (9, H * C)
    torch.testing.assert_close(output, by_messages(conv, (sources, targets), EDGE_INDEX))
    if hasattr(conv, "bias"):
        torch.testing.assert_close(output[7:], conv.bias.expand(2, -1))


@each_layer
@pytest.mark.parametrize("kernel", ["implicit", "rbf"])
@pytest.mark.parametrize("p", [1.5, "learned", None])
def test_kernels_and_orders_train(layer, kernel, p):
    conv = layer(CHANNELS, C, H, kernel=kernel, p=p, num_frequencies=8)
    conv(nodes(), EDGE_INDEX).square().sum().backward()
    trained = [name for name, q in conv.named_parameters() if q.grad is not None and q.grad.any()]
    assert ("magnitude.raw" in trained) == (p == "learned")
    assert ("spectral.w1" in trained) == (kernel == "implicit")


def test_a_learned_order_of_two_is_the_order_two():
    for layer in LAYERS.values():
        torch.manual_seed(0)
        learned = layer(CHANNELS, C, H, p="learned", seed=3)
        fixed = layer(CHANNELS, C, H, p=2.0, seed=3)
        fixed.load_state_dict(learned.state_dict(), strict=False)
        torch.testing.assert_close(learned(nodes(), EDGE_INDEX), fixed(nodes(), EDGE_INDEX))


@each_layer
@pytest.mark.parametrize("spectral", ["stationary", "ikan", "mikan"])
def test_generators_draw_the_frequencies(layer, spectral):
    conv = layer(CHANNELS, C, H, spectral=spectral, num_frequencies=8)
    output = conv(nodes(), EDGE_INDEX)
    loss = output.square().mean() + ikattn.regularization_loss(conv)
    loss.backward()
    assert any(q.grad is not None and q.grad.any() for q in conv.spectral.parameters())


@each_layer
def test_dropout_is_for_training(layer):
    conv = layer(CHANNELS, C, H, dropout=0.5)
    x = nodes()
    assert not torch.equal(conv(x, EDGE_INDEX), conv(x, EDGE_INDEX))
    conv.eval()
    assert torch.equal(conv(x, EDGE_INDEX), conv(x, EDGE_INDEX))


@each_layer
def test_sorted_edges_are_kept_until_the_index_changes(layer):
    conv = layer(CHANNELS, C, H)
    x, edge_index = nodes(), EDGE_INDEX.clone()
    first = conv(x, edge_index)
    assert torch.equal(conv(x, edge_index), first)
    edge_index[:, 0] = torch.tensor([6, 2])
    torch.testing.assert_close(conv(x, edge_index), conv(x, edge_index.clone()))
    assert not torch.allclose(conv(x, edge_index), first)
    more = torch.cat([x, x])  # the same edges in a graph of more nodes
    assert conv(more, edge_index).shape[0] == 2 * N
    torch.testing.assert_close(conv(x, edge_index), conv(x, edge_index.clone()))
    before = len(pyg.edges._sorted_edges)
    del edge_index
    gc.collect()
    assert len(pyg.edges._sorted_edges) < before


@each_layer
@pytest.mark.parametrize("options", [True, False], ids=["loops", "no loops"])
def test_what_an_evaluation_kept_can_be_trained_with(layer, options):
    conv = layer(CHANNELS, C, H, **({} if options else without_loops(layer)))
    edge_index = EDGE_INDEX.clone()
    with torch.inference_mode():
        wanted = conv(nodes(), edge_index)
    output = conv(nodes(), edge_index)
    assert torch.equal(output, wanted)
    output.sum().backward()


@each_layer
def test_edges_that_change_behind_torchs_back_are_seen(layer):
    conv = layer(CHANNELS, C, H)
    x, edge_index = nodes(), EDGE_INDEX.clone()
    conv(x, edge_index)
    edge_index.numpy()[1, :4] = (edge_index.numpy()[1, :4] + 3) % N
    torch.testing.assert_close(conv(x, edge_index), conv(x, edge_index.clone()))
    edge_index.data[1, :4] = (edge_index[1, :4] + 2) % N
    torch.testing.assert_close(conv(x, edge_index), conv(x, edge_index.clone()))
    edge_index.data = EDGE_INDEX[:, :5].clone()
    torch.testing.assert_close(conv(x, edge_index), conv(x, edge_index.clone()))


def test_mikan_takes_a_graph_without_nodes():
    conv = pyg.ImplicitKernelGATConv(CHANNELS, C, H, spectral="mikan")
    assert conv(torch.empty(0, CHANNELS), torch.empty(2, 0).long()).shape == (0, H * C)


@each_pair
def test_conversion_keeps_what_the_layer_holds(stock, layer):
    conv = stock(CHANNELS, C, H).double()
    conv.weight_of_mine = 3
    state = conv.state_dict()
    parameters = dict(conv.named_parameters())
    model = nn.ModuleDict({"conv": conv})
    assert ikattn.convert(model, seed=1) is model
    assert type(conv) is layer
    assert conv.kernel == "implicit"
    assert conv.weight_of_mine == 3
    assert all(dict(conv.named_parameters())[name] is q for name, q in parameters.items())
    assert next(conv.spectral.parameters()).dtype == torch.float64
    x = nodes().double()
    output = conv(x, EDGE_INDEX)
    torch.testing.assert_close(by_messages(conv, x, EDGE_INDEX), output)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(other(x, EDGE_INDEX), output)
    fresh = layer(CHANNELS, C, H, seed=1).double()
    fresh.load_state_dict(state)  # a stock checkpoint leaves the frequencies as they are
    torch.testing.assert_close(fresh(x, EDGE_INDEX), output, rtol=1e-6, atol=1e-6)
    ikattn.revert(model)
    assert type(conv) is stock
    reference = stock(CHANNELS, C, H).double()
    reference.load_state_dict(conv.state_dict())
    for call in (lambda c: c(x, EDGE_INDEX), lambda c: by_messages(c, x, EDGE_INDEX)):
        torch.testing.assert_close(call(conv), call(reference))


def test_conversion_selects_and_names_what_it_leaves(caplog):
    class Mine(GATConv):
        pass

    model = nn.ModuleList([GATConv(4, 4), TransformerConv(4, 4), Mine(4, 4)])
    with caplog.at_level("INFO", logger="ikattn"):
        ikattn.convert(model, "rbf", select=TransformerConv)
        assert [type(x) for x in model] == [GATConv, pyg.ImplicitKernelTransformerConv, Mine]
        ikattn.convert(model)
    assert "not converted: 2 is a " in caplog.text
    assert [getattr(x, "kernel", None) for x in model] == ["implicit", "implicit", None]
    with pytest.raises(ValueError, match="nothing to revert"):
        ikattn.revert(nn.ModuleList([GATConv(4, 4)]))
    assert str(ikattn.conversion_report(model)).splitlines()[:2] == [
        "0  kernel='implicit', p=2.0, Direct",
        "1  kernel='implicit', p=2.0, Direct",
    ]


def test_a_conversion_that_fails_changes_nothing():
    model = nn.ModuleList([GATConv(4, 4), TransformerConv(4, 4)])
    before = [dict(vars(x)) for x in model]

    def broken(attention: nn.Module) -> str:
        if isinstance(attention, TransformerConv):
            raise RuntimeError("no frequencies")
        return "direct"

    with pytest.raises(RuntimeError, match="no frequencies"):
        ikattn.convert(model, spectral=broken)
    assert [type(x) for x in model] == [GATConv, TransformerConv]
    assert [set(vars(x)) for x in model] == [set(held) for held in before]
    assert all("spectral" not in x._modules for x in model)
    model[0](nodes(N, 4), EDGE_INDEX)


def test_the_explainers_explain():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([layer(8, 8) for layer in LAYERS.values()])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edge_index).relu()
            return x

    model, x = Net(), nodes(N, 8)
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    attention = Explainer(model, AttentionExplainer(), "model", config, edge_mask_type="object")(
        x, EDGE_INDEX
    )
    assert attention.edge_mask.shape == (E,)
    assert bool((attention.edge_mask > 0).any())
    masks = Explainer(model, GNNExplainer(epochs=3), "model", config, "attributes", "object")(
        x, EDGE_INDEX, index=3
    )
    assert masks.edge_mask.shape == (E,)
    assert masks.node_mask.shape == x.shape


@each_layer
def test_a_model_goes_to_a_heterogeneous_graph(layer):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = layer((-1, -1), C, H, **without_loops(layer))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index).relu()

    data = HeteroData()
    data["author"].x, data["paper"].x = nodes(), nodes(9, 3)
    data["author", "writes", "paper"].edge_index = EDGE_INDEX
    data["paper", "cites", "paper"].edge_index = EDGE_INDEX
    data["paper", "by", "author"].edge_index = EDGE_INDEX.flip(0)
    model = to_hetero(Net(), data.metadata())
    output = model(data.x_dict, data.edge_index_dict)
    assert {name: tuple(x.shape) for name, x in output.items()} == {
        "author": (N, H * C),
        "paper": (9, H * C),
    }
    output["author"].sum().backward()


@each_layer
def test_torch_compile_takes_a_layer_whole(layer):
    conv = layer(CHANNELS, C, H, **without_loops(layer))
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, dynamic=True)
    for count in (N, 11):
        x = nodes(count)
        torch.testing.assert_close(compiled(x, EDGE_INDEX), conv(x, EDGE_INDEX))


@each_layer
def test_torchscript_is_refused(layer):
    with pytest.raises(RuntimeError, match=f"TorchScript cannot compile {layer.__name__}"):
        torch.jit.script(layer(CHANNELS, C, H))


def test_errors_name_the_argument():
    conv = pyg.ImplicitKernelGATConv(CHANNELS, C, H)
    with pytest.raises(ValueError, match=r"x must have shape \[N, channels\], got \[2, 7, 5\]"):
        conv(torch.zeros(2, N, CHANNELS), EDGE_INDEX)
    with pytest.raises((IndexError, ValueError, RuntimeError), match=r"target must be in|col must"):
        conv(nodes(4), EDGE_INDEX)
    with_edges = pyg.ImplicitKernelTransformerConv(CHANNELS, C, H, edge_dim=3)
    with pytest.raises(ValueError, match=r"edge_attr must have shape \[E, 3\]"):
        with_edges(nodes(), EDGE_INDEX)
    with pytest.raises(ValueError, match="kernel must be one of"):
        pyg.ImplicitKernelGATConv(CHANNELS, C, H, kernel="cosine")  # type: ignore[arg-type]
