"""Scores in int8: the results are those of features rounded to integers."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

import ikattn
from gpu import IN_THE_INTERPRETER, is_on, needs_a_gpu, on_gpu

if IN_THE_INTERPRETER:
    has_hopper = os.environ.get("IKATTN_INTERPRETER_HOPPER") == "1"
else:
    has_hopper = torch.cuda.get_device_capability()[0] == 9
if not (has_hopper and is_on("hopper") and is_on("int8")):
    pytest.skip("no GPU here takes scores in int8", allow_module_level=True)

D, M, EPS = 16, 64, 1e-5
NAMES = ("query", "key", "value", "w1", "w2")


def arguments(queries: int, keys: int, heads: int = 2, key_heads: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens = {
        "query": normal(2, heads, queries, D),
        "key": normal(2, key_heads, keys, D),
        "value": normal(2, key_heads, keys, D),
    }
    frequencies = {name: 0.1 * normal(key_heads, D, M) for name in ("w1", "w2")}
    return {name: x.bfloat16() for name, x in tokens.items()} | frequencies


def composition(
    given: dict[str, Tensor], *, rounds: bool, is_causal: bool = False, p: int | None = 2
) -> Tensor:
    """With features rounded to multiples of 2 / 127; gradients pass through the rounding."""

    def features(x: Tensor) -> Tensor:
        angles = (2 * math.pi * (x @ w) for w in (given["w1"], given["w2"]))
        cosines, sines = zip(*((angle.cos(), angle.sin()) for angle in angles), strict=True)
        phi = torch.cat([sum(cosines), sum(sines)], -1)
        return phi + ((phi * 63.5).round() / 63.5 - phi).detach() if rounds else phi

    key = given["key"]
    score = features(given["query"]) @ features(key).transpose(-1, -2) / (4 * M)
    weights = score.square() + EPS
    if p is not None:
        weights = weights * (key.square().sum(-1) / (2 * math.sqrt(D))).exp().unsqueeze(-2)
    if is_causal:
        weights = weights.tril()
    weights = weights / weights.sum(-1, keepdim=True)
    return weights @ given["value"]


def with_gradients(output: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    incoming = torch.randn(output.shape, generator=generator).to(output)
    gradients = torch.autograd.grad(output, [given[name] for name in NAMES], incoming)
    return [x.detach().cpu().double() for x in (output, *gradients)]


def leaves(given: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: x.detach().to(dtype).requires_grad_() for name, x in given.items()}


def relative(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).norm() / expected.norm())


@pytest.mark.parametrize("is_causal", [False, True])
def test_results_are_those_of_rounded_features(is_causal: bool) -> None:
    given = arguments(150, 150)
    options = {"is_causal": is_causal}
    rounded, exact = (
        with_gradients(composition(x, rounds=rounds, **options), x)
        for rounds in (True, False)
        for x in [leaves(given, torch.float64)]
    )
    x = leaves(given, torch.bfloat16)
    composed = with_gradients(composition(x, rounds=False, **options), x)  # type: ignore[arg-type]
    there = leaves(on_gpu(given))
    output = ikattn.implicit_kernel_attention(**there, is_causal=is_causal)  # type: ignore[arg-type]
    for index, found in enumerate(with_gradients(output, there)):
        assert relative(found, rounded[index]) < 6e-3
        allowed = 2 if index == 0 else 5
        assert relative(found, exact[index]) < allowed * relative(composed[index], exact[index])


def test_angles_of_hundreds_of_cycles() -> None:
    given = arguments(130, 150)
    for name in ("query", "key"):
        given[name] *= 100
    options = {"p": None}
    rounded = composition({name: x.double() for name, x in given.items()}, rounds=True, p=None)
    output = ikattn.implicit_kernel_attention(**on_gpu(given), **options)  # type: ignore[arg-type]
    assert relative(output.cpu().double(), rounded) < 2e-2


@needs_a_gpu
def test_int8_is_told_and_not_taken_where_it_is_not_accurate() -> None:
    given = on_gpu(arguments(20, 150))

    def scores(**changed: object) -> list[str | None]:
        call = {**given, **changed}
        options = {name: call.pop(name) for name in ("eps",) if name in call}
        return [choice.scores for choice in ikattn.which_kernels(**call, **options)]  # type: ignore[arg-type]

    assert scores() == ["int8", "int8"]
    assert scores(eps=0.95) == [None, None]
    few = {name: given[name][..., :32].contiguous() for name in ("w1", "w2")}
    assert scores(**few) == [None, None]
    half = {name: given[name].half() for name in ("query", "key", "value")}
    assert scores(**half) == [None, None]


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_token_that_is_not_finite_spoils_what_sees_it(name: str, bad: float) -> None:
    given = arguments(130, 150)
    given[name][1, 1, 7, 3] = bad
    output = ikattn.implicit_kernel_attention(**on_gpu(given)).cpu()
    is_nan = output.isnan()
    spoiled = is_nan[1, 1, 7] if name == "query" else is_nan[1, 1]
    assert spoiled.all()
    assert is_nan.sum() == spoiled.numel()


def test_hidden_keys_may_hold_anything() -> None:
    given = arguments(20, 150)
    bias = torch.zeros(2, 1, 150)
    bias[:, :, ::3] = -math.inf
    there = on_gpu(given | {"key_bias": bias})
    expected = ikattn.implicit_kernel_attention(**there)
    given["key"][:, :, ::3] = math.nan
    given["value"][:, :, ::3] = math.inf
    there = on_gpu(given | {"key_bias": bias})
    assert torch.equal(ikattn.implicit_kernel_attention(**there), expected)
    assert expected.isfinite().all()
