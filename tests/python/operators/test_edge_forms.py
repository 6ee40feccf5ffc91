"""Softmax attention and the GAT form over the edges of a graph, by their definitions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import ikattn
from drawing import normals
from edge_samples import EDGE_INDEX, EDGES, N_K, N_Q, SIZE, VALUE_SIZE, E, H, M, nodes


def by_logits(logit: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of logit(i, j, h) over the edges into each target, and its sum of values."""
    weights = torch.zeros(E, H, dtype=torch.float64)
    for i in range(N_Q):
        into = [e for e in range(E) if EDGE_INDEX[1, e] == i]
        for h in range(H):
            if into:
                logits = [logit(i, int(EDGE_INDEX[0, e]), h) for e in into]
                weights[into, h] = torch.stack(logits).softmax(0)
    weighted = weights.unsqueeze(-1) * value[EDGE_INDEX[0]]
    return torch.zeros(N_Q, H, VALUE_SIZE).double().index_add(0, EDGE_INDEX[1], weighted), weights


def gat_arguments(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    normal = normals(2, dtype)
    return {
        "vector": normal(H, 2 * SIZE),
        "target": normal(N_Q, H, SIZE),
        "source": normal(N_K, H, SIZE),
        "value": normal(N_K, H, VALUE_SIZE),
        "w1": 0.2 * normal(H, 2 * SIZE, M),
        "w2": 0.2 * normal(H, 2 * SIZE, M),
    }


def of_form(form: str, dtype: torch.dtype = torch.float64) -> tuple[Any, dict[str, Any]]:
    """The function and arguments of "softmax", "gat" or "gat rbf", which has no frequencies."""
    is_softmax = form == "softmax"
    arguments = nodes(dtype=dtype) if is_softmax else gat_arguments(dtype)
    if form != "gat":
        del arguments["w1"], arguments["w2"]
    ops = ikattn.ops
    return ops.softmax_edge_attention if is_softmax else ops.gat_edge_attention, arguments


@pytest.mark.parametrize("p", [2.0, 1.0, 3.5, None])
def test_the_gat_form_of_the_rbf_kernel_is_that_of_the_definition(p):
    arguments = gat_arguments() | {"w1": None, "w2": None}
    root = (2 * SIZE) ** 0.5

    def logit(i: int, j: int, h: int) -> Tensor:
        x = torch.cat([arguments["target"][i, h], arguments["source"][j, h]])
        score = -(arguments["vector"][h] - x).square().sum() / (2 * root)
        return score if p is None else score + torch.linalg.vector_norm(x, p) ** 2 / (2 * root)

    found = ikattn.ops.gat_edge_attention(edges=EDGES, p=p, return_weights=True, **arguments)
    torch.testing.assert_close(found, by_logits(logit, arguments["value"]), rtol=1e-9, atol=1e-11)


def assert_derivatives(call: Any, arguments: dict[str, Any]) -> None:
    names, inputs = list(arguments), [x.requires_grad_() for x in arguments.values()]

    def of_values(*values: Tensor) -> tuple[Tensor, Tensor]:
        return call(**dict(zip(names, values, strict=True)))  # type: ignore[no-any-return]

    assert gradcheck(of_values, inputs, check_forward_ad=True)
    assert gradgradcheck(of_values, inputs, atol=1e-4)


@pytest.mark.parametrize("p", [2.0, 1.5])
@pytest.mark.parametrize("form", ["softmax", "gat", "gat rbf"])
def test_derivatives_of_other_forms_are_those_of_differences(form, p):
    function, arguments = of_form(form)
    call = functools.partial(function, edges=EDGES, p=p, return_weights=True)
    assert_derivatives(call, arguments)


@pytest.mark.parametrize("form", ["softmax", "gat"])
def test_other_forms_go_through_compile_autocast_and_opcheck(form):
    function, arguments = of_form(form, torch.float32)
    call = functools.partial(function, edges=EDGES, p=3.0, return_weights=True)
    wanted = call(**arguments)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(**arguments), wanted)
    kept = {"vector", "w1", "w2"}
    lowered = {name: x if name in kept else x.bfloat16() for name, x in arguments.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call(**arguments)[0], call(**lowered)[0])
    tensors = list(arguments.values())
    place = 3 if form == "softmax" else 4
    tensors[place:place] = [EDGES.rowptr, EDGES.col]
    operator = getattr(torch.ops.ikattn, f"{form}_edge_attention").default
    torch.library.opcheck(operator, tensors, {"p": 3.0})


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-25])
def test_norms_of_zero_have_a_gradient_in_the_gat_form(size):
    arguments = gat_arguments(torch.float32)
    arguments["target"][1] *= size  # the edge 3 -> 1 is small at both ends
    arguments["source"][3:5] *= size
    inputs = {name: tensor.requires_grad_() for name, tensor in arguments.items()}
    for p in (1.0, 1.5, 4.0):
        output = ikattn.ops.gat_edge_attention(edges=EDGES, p=p, **inputs)
        grads = torch.autograd.grad(output.square().sum(), list(inputs.values()))
        assert all(bool(grad.isfinite().all()) for grad in grads)


SLOPE = 0.3


def leaky_call(form: str) -> tuple[Any, dict[str, Any]]:
    function, arguments = of_form("gat rbf" if form == "gat" else form)
    call = functools.partial(function, edges=EDGES, negative_slope=SLOPE, return_weights=True)
    return call, arguments


def test_a_leaky_relu_takes_logits_with_their_biases():
    call, arguments = leaky_call("gat")
    bias = torch.randn(EDGE_INDEX.max() + 1, EDGE_INDEX.max() + 1, H, dtype=torch.float64)
    bias[4, 4] = -1e300

    def logit(i: int, j: int, h: int) -> Tensor:
        x = torch.cat([arguments["target"][i, h], arguments["source"][j, h]])
        products = x @ arguments["vector"][h] / (2 * SIZE) ** 0.5
        return torch.nn.functional.leaky_relu(products + bias[i, j, h], SLOPE)

    of_edges = bias[EDGE_INDEX[1], EDGE_INDEX[0]]
    found = call(edge_bias=of_edges.masked_fill(of_edges == -1e300, -torch.inf), **arguments)
    torch.testing.assert_close(found, by_logits(logit, arguments["value"]))


@pytest.mark.parametrize("form", ["softmax", "gat"])
def test_derivatives_through_a_leaky_relu_are_those_of_differences(form):
    call, arguments = leaky_call(form)
    bias = torch.randn(E, H, dtype=torch.float64)
    assert_derivatives(call, arguments | {"edge_bias": bias})


def test_a_leaky_relu_needs_logits_that_are_products():
    call, arguments = leaky_call("softmax")
    for options in ({"p": 1.0}, {"magnitude_scale": 0.2}, {"negative_slope": float("nan")}):
        with pytest.raises(ValueError, match="softmax_edge_attention: negative_slope must be"):
            call(**arguments, **options)
    with pytest.raises(ValueError, match="gat_edge_attention: negative_slope must be 1"):
        ikattn.ops.gat_edge_attention(edges=EDGES, negative_slope=0.2, **gat_arguments())


GAT_ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "vector": ({"vector": torch.zeros(2, 7)}, RuntimeError, r"vector .* \[2, 8\], got \[2, 7\]"),
    "target": ({"target": torch.zeros(7, 8)}, RuntimeError, r"target must have shape \[N_q, H, d"),
    "source": ({"source": torch.zeros(9, 2, 5)}, RuntimeError, "source must have the head size of"),
    "w1": ({"w1": torch.zeros(2, 4, 5)}, RuntimeError, "w1 must have shape"),
    "w2 alone": ({"w1": None}, RuntimeError, "w2 must be None where w1 is"),
}


@pytest.mark.parametrize(("changed", "error", "message"), GAT_ERRORS.values(), ids=GAT_ERRORS)
def test_errors_of_the_gat_form_name_the_argument(changed, error, message):
    with pytest.raises(error, match=f"gat_edge_attention: {message}"):
        ikattn.ops.gat_edge_attention(edges=EDGES, **(gat_arguments(torch.float32) | changed))
