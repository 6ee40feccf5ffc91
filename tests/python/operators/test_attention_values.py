"""The output of implicit-kernel attention: its numbers, shape, type and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import formula
import ikattn
from agreement import assert_output_accurate, in_float64
from samples import BY_NAME, DTYPES, SAMPLES, Arguments, Sample, name_of
from tiers import each_call, few_of

reference = ikattn.reference.implicit_kernel_attention


def log_normalizer(**arguments: object) -> Tensor:
    return torch.ops.ikattn.implicit_kernel_attention(**arguments)[1]


@pytest.mark.operators
@each_call(SAMPLES, dtype=DTYPES)
def test_output_is_as_accurate_as_the_reference(sample: Sample, dtype: torch.dtype) -> None:
    arguments = sample.arguments(dtype)
    output = ikattn.implicit_kernel_attention(**arguments)
    assert_output_accurate(output, reference(**arguments), in_float64(reference, arguments))


def rounding_of_fixed_point(**arguments: Any) -> Tensor:
    """How far log Z may be off where features are rounded to steps, [B, H, L].

    A step is at most the norm of a token's features / 32766, so that rounding, uniform and
    independent, gives a score a standard deviation of sqrt(2 / 12) steps times the other norm.
    Allowed are six of them, all in one direction.
    """
    query, key, w1 = arguments["query"], arguments["key"], arguments["w1"]
    heads = query.shape[1]
    key = formula.of_query_heads(key, 1, heads)
    w1, w2 = (
        w if w is None else formula.of_query_heads(w, -3, heads) for w in (w1, arguments["w2"])
    )
    s = formula.covariance(query, key, w1, w2)
    norms = [
        formula.covariance(x, x, w1, w2).diagonal(dim1=-2, dim2=-1).sqrt() for x in (query, key)
    ]
    off = 6 * (2 / 12) ** 0.5 / 32766 * norms[0].unsqueeze(-1) * norms[1].unsqueeze(-2)
    relative = (2 * s.abs() + off) * off / (s.square() + arguments["eps"])
    arguments = {**arguments, "dropout_p": 0.0}
    arguments.pop("value")
    return (formula.weights(**arguments) * relative).sum(-1)


@each_call(SAMPLES, dtype=DTYPES)
def test_log_normalizer_is_the_logarithm_of_the_sum_of_the_weights(sample, dtype):
    arguments = sample.arguments(dtype)
    got = log_normalizer(**arguments)
    expected = in_float64(formula.log_normalizer, arguments)
    assert got.dtype == torch.float64
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    finite = expected.isfinite()
    assert torch.equal(got[~finite], expected[~finite])
    allowed = torch.full_like(expected, tolerance)[finite]
    if finite.any():
        allowed *= max(1.0, float(expected[finite].abs().max()))
    if dtype == torch.bfloat16 and torch.ops.ikattn.sixteen_bit_instructions() != "none":
        allowed += in_float64(rounding_of_fixed_point, arguments)[finite]
    assert ((got - expected)[finite].abs() <= allowed).all()


@each_call(few_of(SAMPLES), dtype=DTYPES)
def test_output_is_laid_out_as_the_projection_after_it_reads_it(sample, dtype):
    output = ikattn.implicit_kernel_attention(**sample.arguments(dtype))
    assert output.shape == (sample.B, sample.H, sample.L, sample.d_v)
    assert output.dtype == dtype
    assert output.transpose(1, 2).is_contiguous()


def test_defaults_are_the_papers() -> None:
    arguments = Sample("defaults", d=40).arguments()
    tensors = {name: arguments[name] for name in ("query", "key", "value", "w1", "w2")}
    explicit: Arguments = {"p": 2.0, "eps": 1e-5, "magnitude_scale": 1 / (2 * 40**0.5)}
    default = ikattn.implicit_kernel_attention(**tensors)
    assert torch.equal(default, ikattn.implicit_kernel_attention(**tensors, **explicit))
    for name, other in (("p", 3.0), ("eps", 1e-2), ("magnitude_scale", 1 / (2 * 40**0.25))):
        changed = ikattn.implicit_kernel_attention(**tensors, **(explicit | {name: other}))
        assert (changed - default).abs().max() > 1e-4, name


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_frequencies_bias_and_mask_may_be_float32_beside_any_dtype(dtype: torch.dtype) -> None:
    arguments = BY_NAME["float32 beside lower precision"].arguments(torch.float32)
    tokens = {name: arguments[name].to(dtype) for name in ("query", "key", "value")}
    arguments = arguments | tokens
    output = ikattn.implicit_kernel_attention(**arguments)
    assert output.dtype == dtype
    assert_output_accurate(output, reference(**arguments), in_float64(reference, arguments))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_output_needs_no_graph_where_none_is_wanted(context: type) -> None:
    arguments = BY_NAME["everything at once"].arguments()
    arguments["w1"] = arguments["w1"].detach().requires_grad_()
    with context():
        output = ikattn.implicit_kernel_attention(**arguments)
    assert not output.requires_grad
    assert torch.equal(output, ikattn.implicit_kernel_attention(**arguments).detach())


def test_the_naive_formula_is_the_reference() -> None:
    from ikattn.ops import naive

    q, k, v = torch.randn(3, 2, 4, 7, 6, dtype=torch.float64)
    w1, w2 = 0.3 * torch.randn(2, 4, 6, 5, dtype=torch.float64)
    hidden = torch.where(torch.ones(7, 7).tril().bool(), 0.0, -torch.inf)
    found = naive.attention(q, k, v, w1, w2, p=3.0, bias=hidden)
    expected = reference(q, k, v, w1, w2, p=3.0, is_causal=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
