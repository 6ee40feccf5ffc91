"""Attention over the edges of a graph, by its definition edge by edge, and under transforms."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import ikattn
from drawing import normals
from edge_samples import EDGE_INDEX, EDGES, N_K, N_Q, SIZE, VALUE_SIZE, E, H, M, nodes
from ikattn.ops import Edges

attention = functools.partial(ikattn.implicit_kernel_edge_attention, return_weights=True)
INFINITY = float("inf")


BIASES = torch.randn(N_K + E, H, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stationary": {"w2": None},
    "p = 2.7, scale, eps": {"p": 2.7, "magnitude_scale": 0.4, "eps": 1e-3},
    "both biases": {"key_bias": BIASES[:N_K], "edge_bias": BIASES[N_K:]},
}


def test_the_guides_examples_run(capsys):
    root = next(path for path in Path(__file__).parents if (path / "setup.py").exists())
    guide = (root / "docs/guide/graphs.md").read_text()
    first, *with_pyg = re.findall(r"```python\n(.*?)```", guide, re.S)
    names: dict[str, Any] = {}
    exec(compile(first, "docs/guide/graphs.md", "exec"), names)
    assert names["output"].shape == (4, 2, 8)
    assert names["weights"].shape == (4, 2)
    pytest.importorskip("torch_geometric")
    assert len(with_pyg) == 2
    for example in with_pyg:
        exec(compile(example, "docs/guide/graphs.md", "exec"), {})
    assert "[4, 3]" in capsys.readouterr().out


def test_distant_magnitudes_neither_overflow_nor_vanish():
    arguments = nodes(dtype=torch.float32)
    arguments["key"][0] *= 100  # the others weigh less than the least float32 beside it
    output, weights = attention(edges=EDGES, **arguments)
    assert bool(output.isfinite().all())
    torch.testing.assert_close(
        torch.zeros(N_Q, H).index_add(0, EDGE_INDEX[1], weights),
        torch.ones(N_Q, H).index_fill(0, torch.tensor([2, 6]), 0.0),
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_may_be_given_and_of_either_integer(dtype):
    arguments = nodes()
    sorted_edges = Edges(EDGES.rowptr.to(dtype), EDGES.col.to(dtype))
    output, weights = attention(edges=sorted_edges, **arguments)
    wanted, wanted_weights = attention(edges=EDGES, **arguments)
    assert torch.equal(output, wanted)
    assert torch.equal(weights, wanted_weights[EDGES.order])


@pytest.mark.parametrize(("queries", "keys"), [(N_Q, N_K), (0, N_K), (N_Q, 0), (0, 0)])
def test_a_graph_without_edges_gives_zeros(queries, keys):
    arguments = nodes()
    arguments["query"] = arguments["query"][:queries]
    arguments["key"], arguments["value"] = arguments["key"][:keys], arguments["value"][:keys]
    leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items()}
    none = torch.empty(0, dtype=torch.int64)
    output, weights = attention(edges=Edges.from_coo(none, none, queries), **leaves)
    assert output.shape == (queries, H, VALUE_SIZE)
    assert not output.any()
    assert weights.shape == (0, H)
    output.sum().backward()
    assert not leaves["query"].grad.any()


@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives_of_every_order_are_those_of_differences(name):
    others = nodes() | OPTIONS[name]
    names = [name for name, value in others.items() if isinstance(value, Tensor)]
    inputs = tuple(others.pop(name).clone().requires_grad_() for name in names)

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return attention(edges=EDGES, **dict(zip(names, values, strict=True)), **others)

    assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, inputs, atol=1e-4)


def test_a_hidden_edge_keeps_a_row_of_nan_from_its_source():
    bias = torch.zeros(E, dtype=torch.float64)
    edge = 3  # 3 -> 1, whose target has another edge
    bias[edge] = -INFINITY
    inputs = [nodes()[name] for name in ("query", "key", "value")]
    inputs[0][1] = torch.nan
    output, weights = ikattn.ops.softmax_edge_attention(
        *(x.requires_grad_() for x in inputs), EDGES, edge_bias=bias, return_weights=True
    )
    assert bool((weights[edge] == 0).all())
    assert bool(output[1].isnan().all())
    assert bool(output[0].isfinite().all())


@pytest.mark.parametrize("name", ["plain", "both biases"])
def test_torch_compile_and_opcheck_take_it(name):
    arguments = nodes(dtype=torch.float32) | {
        key: value.float() for key, value in OPTIONS[name].items()
    }
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    for actual, wanted in zip(
        compiled(edges=EDGES, **arguments), attention(edges=EDGES, **arguments), strict=True
    ):
        torch.testing.assert_close(actual, wanted)
    main = [arguments.pop(name) for name in ("query", "key", "value")]
    main = [tensor.requires_grad_() for tensor in main]
    rest = [EDGES.rowptr, EDGES.col, arguments.pop("w1"), arguments.pop("w2")]
    operator = torch.ops.ikattn.implicit_kernel_edge_attention.default
    torch.library.opcheck(operator, (*main, *rest), arguments)


def test_vmap_maps_over_graphs_with_the_same_edges():
    batches = [nodes(seed) for seed in range(3)]
    stacked = {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}
    output, weights = torch.func.vmap(lambda batch: attention(edges=EDGES, **batch))(stacked)
    for i, batch in enumerate(batches):
        wanted, wanted_weights = attention(edges=EDGES, **batch)
        torch.testing.assert_close(output[i], wanted)
        torch.testing.assert_close(weights[i], wanted_weights)


def test_autocast_lowers_the_nodes_alone():
    arguments = nodes(dtype=torch.float32)
    wanted, _ = attention(
        edges=EDGES, **{name: t if "w" in name else t.bfloat16() for name, t in arguments.items()}
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(edges=EDGES, **arguments)[0], wanted)


def features(options: dict[str, Any], dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the operator that has kernels, and its numbers."""
    normal = normals(3, dtype)
    tensors = [normal(N_Q, H, 2 * M), normal(N_K, H, 2 * M), normal(N_K, H, VALUE_SIZE)]
    tensors = [tensor.requires_grad_() for tensor in (*tensors, normal(N_K, H))]
    of_edges, keep = options.get("edges"), options.get("keep")
    if of_edges is not None:
        of_edges = normal(*of_edges).index_fill(0, torch.tensor([3]), -INFINITY).requires_grad_()
    if keep is not None:
        keep = torch.rand(E, H, generator=torch.Generator().manual_seed(3)) < keep
    numbers = {"eps": options.get("eps", 1e-3), "rescale": options.get("rescale", 1.0)}
    return [*tensors, of_edges, keep, EDGES.rowptr, EDGES.col], numbers


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "edges [E, H]": {"edges": (E, H)},
    "edges [E, 1], dropout": {"edges": (E, 1), "keep": 0.6, "rescale": 1 / 0.6},
    "exponential": {"eps": None},
    "exponential, edges [E, H], dropout": {"eps": None, "edges": (E, H), "keep": 0.6},
}
each_features = pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)


@pytest.mark.operators
@each_features
def test_kernels_compute_what_the_composition_does(options):
    arguments, numbers = features(options, torch.float64)
    kernel = torch.ops.ikattn.edge_attention_from_features
    composition = kernel.default._op_dk
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    found, wanted = kernel(*arguments, **numbers), composition(key, *arguments, **numbers)
    torch.testing.assert_close(found, wanted)
    grads = [torch.randn_like(tensor) for tensor in found[:2]]
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    saved = {"output": found[0], "log_normalizer": found[2]}
    for grad_weights in (grads[1], None):
        given = {**numbers, **saved, "grad_output": grads[0], "grad_weights": grad_weights}
        by_target = torch.ops.ikattn.edge_query_gradients
        results = by_target(*arguments, **given)
        torch.testing.assert_close(results, by_target.default._op_dk(key, *arguments, **given))
        by_source = torch.ops.ikattn.edge_key_gradients
        call = (results[1], arguments[0], grads[0], EDGES.rowptr, EDGES.col, N_K)
        torch.testing.assert_close(by_source(*call), by_source.default._op_dk(key, *call))


@each_features
def test_the_operator_with_kernels_passes_opcheck_and_gradcheck(options):
    arguments, numbers = features(options, torch.float64)
    operator = torch.ops.ikattn.edge_attention_from_features.default
    torch.library.opcheck(operator, arguments, numbers)
    inputs = arguments[:4]

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return operator(*values, *arguments[4:], **numbers)[:2]

    assert gradcheck(call, inputs)


@pytest.mark.operators
def test_numbers_of_threads_do_not_change_a_bit():
    generator = torch.Generator().manual_seed(0)
    count = 30_000  # one target has half of the edges, one source a third
    target = torch.randint(500, (count,), generator=generator)
    source = torch.randint(400, (count,), generator=generator)
    target[: count // 2], source[: count // 3] = 7, 9
    edges = Edges.from_coo(source, target, 500)
    arguments = nodes(dtype=torch.float32)
    for name, rows in (("query", 500), ("key", 400), ("value", 400)):
        shape = (rows, *arguments[name].shape[1:])
        arguments[name] = torch.randn(shape, generator=generator).requires_grad_()
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        output, weights = attention(edges=edges, **arguments)
        inputs = [arguments[name] for name in ("query", "key", "value")]
        loss = output.square().sum() + weights.square().sum()
        results.append([output, weights, *torch.autograd.grad(loss, inputs)])
    torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))


def test_the_operator_with_kernels_refuses_broken_edges():
    arguments, numbers = features({}, torch.float32)
    operator = torch.ops.ikattn.edge_attention_from_features
    for place, index, message in (
        (6, EDGES.rowptr + 1, "rowptr must begin with 0"),
        (7, EDGES.col + 2, "col must hold sources"),
        (7, EDGES.col[:3], "rowptr must end with E = 3"),
        (7, EDGES.col.int(), "col must"),
        (2, torch.zeros(3, H, 1), "value must"),
    ):
        broken = [*arguments]
        broken[place] = index
        with pytest.raises((RuntimeError, TypeError, ValueError, IndexError), match=message):
            operator(*broken, **numbers)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", [1, 2, 3, 6, 7])
def test_a_meta_tensor_among_others_is_refused(place, mode):
    """Torch would choose the fake kernel, which returns memory that nobody wrote."""
    arguments, numbers = features({}, torch.float32)
    arguments[place] = arguments[place].to("meta")
    operator = torch.ops.ikattn.edge_attention_from_features
    with mode(), pytest.raises(RuntimeError, match=r"edge_attention_from_features: .* device"):
        operator(*arguments, **numbers)
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    given = {
        "output": torch.zeros(N_Q, H, VALUE_SIZE),
        "log_normalizer": torch.zeros(N_Q, H, dtype=torch.float64),
        "grad_output": torch.zeros(N_Q, H, VALUE_SIZE),
    }
    with mode(), pytest.raises(RuntimeError, match=r"edge_query_gradients: .* device"):
        torch.ops.ikattn.edge_query_gradients(*arguments, **numbers, **given)
    call = [torch.zeros(E, 3, H), arguments[0], given["grad_output"], EDGES.rowptr, EDGES.col, N_K]
    call[place % 5] = call[place % 5].to("meta")
    with mode(), pytest.raises(RuntimeError, match=r"edge_key_gradients: .* device"):
        torch.ops.ikattn.edge_key_gradients(*call)


@pytest.mark.operators
@pytest.mark.parametrize("eps", [1e-3, None], ids=["implicit", "exponential"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_of_a_long_row_add_up(eps, dtype):
    """A target of 5000 edges, and a source of as many, are cut into pieces."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(N_K, (7000,), generator=generator)
    target = torch.randint(N_Q, (7000,), generator=generator)
    target[:5000], source[2000:] = 3, 5
    edges = Edges.from_coo(source, target, N_Q)
    arguments, _ = features({}, torch.float64)
    inputs = [tensor.detach().float() for tensor in arguments[:4]]  # exact in both types
    inputs[3] *= 10  # logits of which the largest decides
    operator = torch.ops.ikattn.edge_attention_from_features.default
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    rest = (None, None, edges.rowptr, edges.col, eps)

    def results(call: Any, kind: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(kind).requires_grad_() for tensor in inputs]
        output, weights, _ = call(*leaves, *rest)
        grad_output, grad_weights = output.detach().cos(), weights.detach().sin()
        grads = torch.autograd.grad((output, weights), leaves, (grad_output, grad_weights))
        return [output, weights, *grads]

    composition = functools.partial(operator._op_dk, key)
    wanted = results(composition, torch.float64)

    def errors(call: Any) -> list[float]:
        return [
            float((found.double() - value).abs().max() / value.abs().max())
            for found, value in zip(results(call, dtype), wanted, strict=True)
        ]

    least = 1e-10 if dtype == torch.float64 else 1e-6
    for error, other in zip(errors(operator), errors(composition), strict=True):
        assert error <= max(2 * other, least)


def test_an_exported_program_decomposes_to_functions_of_torch():
    class Layer(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            edges = Edges(EDGES.rowptr, EDGES.col)
            w1 = torch.linspace(-0.1, 0.1, H * SIZE * M).view(H, SIZE, M)
            return ikattn.implicit_kernel_edge_attention(query, key, value, edges, w1)

    arguments = nodes(dtype=torch.float32)
    given = tuple(arguments[name] for name in ("query", "key", "value"))
    wanted = Layer()(*given)
    program = torch.export.export(Layer(), given).run_decompositions(ikattn.ops.decompositions())
    assert "ikattn" not in str(program.graph)
    torch.testing.assert_close(program.module()(*given), wanted)


def test_dropout_drops_edges_and_repeats_with_a_seed():
    count = 20_000
    target = torch.arange(10).repeat_interleave(count // 10)
    source = torch.arange(count) % N_K
    edges = Edges.from_coo(source, target, 10, is_sorted=True)
    arguments = nodes(dtype=torch.float32)
    arguments["query"] = torch.randn(10, H, SIZE)
    seed = torch.tensor([5, 3])
    call = functools.partial(attention, edges=edges, dropout_p=0.25, **arguments)
    output, weights = call(dropout_seed=seed)
    again, _ = call(dropout_seed=seed)
    assert torch.equal(output, again)
    assert not torch.equal(output, call()[0])
    _, whole = attention(edges=edges, **arguments)
    kept = weights != 0
    torch.testing.assert_close(
        kept.double().mean(0), torch.full((H,), 0.75).double(), rtol=0, atol=0.02
    )
    torch.testing.assert_close(weights[kept], whole[kept] / 0.75)
    assert not torch.equal(kept[:, 0], kept[:, 1])
    values = arguments["value"][source]
    wanted = torch.zeros_like(output).index_add(0, target, weights.unsqueeze(-1) * values)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-4)


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "axes": ({"query": torch.zeros(7, 4)}, RuntimeError, r"query must have shape \[N_q, H, d\]"),
    "heads": ({"key": torch.zeros(9, 3, 4)}, RuntimeError, r"key must have .* H = 2"),
    "size": ({"key": torch.zeros(9, 2, 5)}, RuntimeError, "key must have the head size of query"),
    "nodes": ({"value": torch.zeros(8, 2, 3)}, RuntimeError, "value must have the nodes of key"),
    "dtype": ({"value": torch.zeros(9, 2, 3).half()}, TypeError, "value must have the dtype of"),
    "w1": ({"w1": torch.zeros(1, 2, 4, 5)}, RuntimeError, r"w1 must have shape \[H, d, M\]"),
    "key bias": ({"key_bias": torch.zeros(7)}, RuntimeError, r"key_bias .* \[9, 2\], got \[7\]"),
    "bias of no axis": ({"key_bias": torch.tensor(1.0)}, RuntimeError, r"key_bias .* got \[\]"),
    "edge bias": ({"edge_bias": torch.zeros(9)}, ValueError, r"edge_bias .* E = 10, got \[9\]"),
    "bool bias": ({"edge_bias": torch.ones(10).bool()}, TypeError, "edge_bias must have the dtype"),
    "eps": ({"eps": 0.0}, ValueError, "eps must be finite and positive"),
    "least eps": ({"eps": 1e-38}, ValueError, "eps must be at least 1e-30 in float32 arithmetic"),
    "p": ({"p": 0.5}, ValueError, "p must be a finite number >= 1 or None"),
    "dropout": ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\)"),
}


@pytest.mark.parametrize(("changed", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(changed, error, message):
    with pytest.raises(error, match=f"implicit_kernel_edge_attention: {message}"):
        attention(edges=EDGES, **(nodes(dtype=torch.float32) | changed))


BROKEN: dict[str, tuple[list[int], list[int], type[Exception], str]] = {
    "begin": ([1, 2, 3], [0, 1, 2], ValueError, "rowptr must begin with 0, got 1"),
    "ascend": ([0, 3, 2], [0, 1], ValueError, "rowptr must ascend, got 3 before 2 at 1"),
    "end": ([0, 1, 2], [0, 1, 2], ValueError, "rowptr must end with E = 3"),
    "length": ([0, 3], [0, 1, 2], RuntimeError, r"rowptr must have shape \[N_q \+ 1\] = \[3\]"),
    "source": ([0, 1, 2], [0, 9], IndexError, r"col must hold sources in \[0, 9\)"),
    "negative": ([0, 1, 2], [0, -1], IndexError, r"col must hold .* got -1"),
}


@pytest.mark.parametrize(("rowptr", "col", "error", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_edges_are_refused(rowptr, col, error, message):
    arguments = nodes()
    arguments["query"] = arguments["query"][:2]
    with pytest.raises(error, match=message):
        attention(edges=Edges(torch.tensor(rowptr), torch.tensor(col)), **arguments)


def test_edges_say_what_is_wrong_with_an_edge_index():
    source, target = EDGE_INDEX
    with pytest.raises(TypeError, match=r"target must be int64 or int32, got torch\.float32"):
        Edges.from_coo(source, target.float(), N_Q)
    with pytest.raises(ValueError, match="must have one shape"):
        Edges.from_coo(source[:3], target, N_Q)
    with pytest.raises(ValueError, match="target must ascend where is_sorted=True"):
        Edges.from_coo(source, target, N_Q, is_sorted=True)
    with pytest.raises(ValueError, match=r"target must be in \[0, num_targets\) = \[0, 5\), got 5"):
        Edges.from_coo(source, target, 5)
    with pytest.raises(ValueError, match="got -1"):
        Edges.from_coo(source, target - 1, N_Q)
