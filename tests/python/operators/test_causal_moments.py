"""Causal attention that goes on from moments, and its gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from agreement import assert_close, assert_identical
from drawing import for_moments
from ikattn.ops import causal_attention_from_moments, key_moments

OPERATORS = torch.ops.ikattn
EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


class Case(NamedTuple):
    """Sizes of a call, letters as in ikattn.ops.moments; keys before, and how logits rise."""

    name: str
    L: int = 70
    before: int = 9
    B: int = 2
    H: int = 4
    K: int = 4
    G: int = 4
    M: int = 4
    d_v: int = 6
    hidden: float = 0.2
    rise: float = 0.0

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("one chunk"),
    Case("grouped, three chunks", L=300, K=2, G=1),
    Case("panels of values", L=130, B=1, H=2, K=2, G=1, M=7, d_v=70),
    Case("panels of features", L=150, B=1, H=2, K=1, G=1, M=33, d_v=5),
    Case("one frequency", L=129, M=1, d_v=1),
    Case("no key before", L=200, before=0),
    Case("later keys outweigh all before", L=300, K=2, G=2, rise=3.0),
    Case("blocks of the composition, and a rest", L=1100, B=1, H=2, K=2, G=1, M=3, rise=0.3),
    Case("no values", d_v=0),
    Case("no token", L=0),
    Case("all hidden", before=0, hidden=1.1),
]


def drawn(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Features of queries and keys, logits, values; the last three of the keys before, too."""
    S = case.before + case.L
    query, key, logits, value = for_moments(case, S, case.L + case.M)
    logits += case.rise * torch.arange(S)
    return tuple(x.to(dtype) for x in (query, key, logits, value))


def divided(case: Case, *keys: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Keys before, and those of the tokens."""
    parts = [x.split([case.before, case.L], 2) for x in keys]
    return [a for a, _ in parts], [b for _, b in parts]


def attend(case: Case, query: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    before, own = divided(case, *keys)
    return causal_attention_from_moments(query, *own, *key_moments(*before))


def by_pairs(case: Case, query: Tensor, key: Tensor, logits: Tensor, value: Tensor) -> Tensor:
    sees = torch.ones(case.L, case.before + case.L, dtype=torch.bool).tril(case.before)
    spread = logits.repeat_interleave(case.H // case.K, 1).unsqueeze(-2)
    spread = spread.masked_fill(~sees, -math.inf)
    return torch.ops.ikattn.attention_from_features_reference(query, key, spread, value)


# --- Numbers --------------------------------------------------------------------------------------


@pytest.mark.operators
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_are_the_compositions(case: Case) -> None:
    """Compositions are differentiable, or go in blocks on devices without kernels."""
    query, *keys = drawn(case)
    before, own = divided(case, *keys)
    moments, reference = key_moments(*before)
    given = [query, *own, moments, reference]
    found = causal_attention_from_moments(*given)
    operator = OPERATORS.causal_attention_from_moments.default
    for others in (
        OPERATORS.causal_attention_from_moments_reference(*given),
        operator._op_dk(EXPLICIT, *given),
    ):
        for one, other in zip(found, others, strict=True):
            assert_close(one, other, 1e-12)
    leaves = [x.clone().requires_grad_() for x in given[:5]]
    output, log_z, moments, _ = OPERATORS.causal_attention_from_moments_reference(
        *leaves, reference
    )
    directions = torch.randn_like(output), torch.randn_like(moments)
    expected = torch.autograd.grad([output, moments], leaves, directions)
    backward = OPERATORS.causal_attention_from_moments_backward.default
    arguments = (*directions, *given, output.detach(), log_z, 1e-5, [True] * 5)
    for gradients in (backward(*arguments), backward._op_dk(EXPLICIT, *arguments)):
        for one, other in zip(gradients, expected, strict=True):
            assert_close(one, other, 1e-11)


@pytest.mark.operators
def test_compositions_pass_along_heads_that_are_many() -> None:
    """The entries of a block's queries are then made some rows at a time."""
    case = Case("many heads", L=130, before=3, B=1, H=80, K=80, G=1, M=33, d_v=3)
    query, *keys = drawn(case, torch.float32)
    before, own = divided(case, *keys)
    given = [query, *own, *key_moments(*before)]
    operator = OPERATORS.causal_attention_from_moments.default
    found, others = operator(*given), operator._op_dk(EXPLICIT, *given)
    for one, other in zip(found, others, strict=True):
        assert_close(one, other, 1e-3)
    arguments = (torch.ones_like(found[0]), None, *given, *found[:2], 1e-5, [True] * 5)
    backward = OPERATORS.causal_attention_from_moments_backward.default
    for one, other in zip(backward(*arguments), backward._op_dk(EXPLICIT, *arguments), strict=True):
        assert_close(one, other, 1e-3)


@pytest.mark.operators
def test_any_strides_are_read_as_they_lie() -> None:
    case = CASES[1]
    query, *keys = drawn(case)
    before, own = divided(case, *keys)
    moments, reference = key_moments(*before)
    given = [query, *own, moments]
    strided = [x.mT.contiguous().mT.requires_grad_() for x in given]
    plain = [x.contiguous().requires_grad_() for x in given]
    outputs = [
        causal_attention_from_moments(*x, reference.mT.contiguous().mT) for x in (strided, plain)
    ]
    directions = [torch.randn_like(outputs[0][n]) for n in (0, 2)]
    gradients = [
        torch.autograd.grad([x[0], x[2]], leaves, directions)
        for x, leaves in zip(outputs, (strided, plain), strict=True)
    ]
    for one, other in zip((*outputs[0], *gradients[0]), (*outputs[1], *gradients[1]), strict=True):
        assert_close(one, other, 1e-12)


@pytest.mark.operators
def test_bits_depend_neither_on_threads_nor_on_the_batch_nor_on_later_tokens() -> None:
    case = CASES[1]
    query, *keys = drawn(case, torch.float32)
    before, own = divided(case, *keys)
    state, count, found = key_moments(*before), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            output, log_z, *after = causal_attention_from_moments(query, *own, *state)
            gradients = OPERATORS.causal_attention_from_moments_backward(
                output, None, query, *own, *state, output, log_z, 1e-5, [True] * 5
            )
            found.append([output, log_z, *after, *gradients])
    finally:
        torch.set_num_threads(count)
    assert_identical(*found)
    item = slice(1, 2)
    alone = causal_attention_from_moments(*(x[item] for x in (query, *own, *state)))
    assert_identical(list(alone), [x[item] for x in found[0][:4]])
    shorter = causal_attention_from_moments(*(x[:, :, :200] for x in (query, *own)), *state)
    assert_identical(shorter[0], found[0][0][:, :, :200])


@pytest.mark.operators
@pytest.mark.parametrize("wanted", range(5))
def test_gradients_one_by_one_are_those_of_all(wanted: int) -> None:
    case = CASES[7]  # of several blocks of the compositions
    query, *keys = drawn(case)
    before, own = divided(case, *keys)
    given = (query, *own, *key_moments(*before))
    output, log_z, moments, _ = causal_attention_from_moments(*given)
    backward = OPERATORS.causal_attention_from_moments_backward.default
    arguments, flags = (
        (output, moments, *given, output, log_z, 1e-5),
        [n == wanted for n in range(5)],
    )
    every, some = backward(*arguments, [True] * 5), backward(*arguments, flags)
    composed = backward._op_dk(EXPLICIT, *arguments, flags)
    assert torch.equal(some[wanted], every[wanted])
    assert_close(composed[wanted], every[wanted], 1e-11)
    assert all(not (some[n].numel() or composed[n].numel()) for n in range(5) if n != wanted)


@pytest.mark.operators
def test_hidden_keys_may_hold_anything() -> None:
    case = Case("hidden", L=200, K=2, G=2, hidden=0.4)
    query, key, logits, value = drawn(case)
    is_hidden = (logits == -math.inf).unsqueeze(-1)
    assert is_hidden.any()
    leaves = [
        query,
        key.masked_fill(is_hidden, math.nan),
        logits,
        value.masked_fill(is_hidden, math.inf),
    ]
    leaves = [x.requires_grad_() for x in leaves]
    output, *_, moments, _ = attend(case, *leaves)
    assert_close(output, by_pairs(case, query, key, logits, value), 1e-12)
    gradients = torch.autograd.grad(output.sum() + moments.sum(), leaves)
    assert all(x.isfinite().all() for x in gradients)
    for of_key in gradients[1], gradients[3]:
        assert not of_key.masked_select(is_hidden).any()


@pytest.mark.operators
@pytest.mark.parametrize("name", ["key", "logits", "value"])
def test_a_key_that_is_not_finite_reaches_the_queries_that_see_it(name: str) -> None:
    case = Case("poison", L=200, K=2, G=2, hidden=0.0)
    tensors = dict(zip(("query", "key", "logits", "value"), drawn(case), strict=True))
    tensors[name][0, 1, case.before + 70] = math.nan
    leaves = [x.requires_grad_() for x in tensors.values()]
    output, *_, moments, _ = attend(case, *leaves)
    assert output[0, 2:, 70:].isnan().all()
    assert moments[0, 1].isnan().any()
    assert output[0, :2].isfinite().all()
    assert output[0, 2:, :70].isfinite().all()
    assert output[1].isfinite().all()
    of_query, of_key, *_ = torch.autograd.grad(output[:, :, :70].sum(), leaves)
    assert of_query[0, 2:, 70:].isnan().all()
    assert of_query[0, 2:, :70].isfinite().all()
    assert of_key[1].isfinite().all()


@pytest.mark.operators
def test_a_query_that_is_not_finite_reaches_the_keys_that_it_sees() -> None:
    case = Case("poison", L=200, K=2, G=2, hidden=0.0)
    query, *keys = drawn(case)
    query[0, 2, 70, 1] = math.nan
    before, own = divided(case, *keys)
    state = key_moments(*before)
    leaves = [x.requires_grad_() for x in (query, *own, state[0])]
    output = causal_attention_from_moments(*leaves, state[1])[0]
    assert output[0, 2, 70].isnan().all()
    assert output.isnan().sum() == case.d_v
    of_query, of_key, _, _, of_moments = torch.autograd.grad(output.sum(), leaves)
    assert of_query.isnan().any(-1).sum() == 1
    assert of_key[0, 1, :71].isnan().all()
    assert of_key[0, 1, 71:].isfinite().all()
    assert of_key[0, 0].isfinite().all()
    assert of_moments[0, 1].isnan().any()
    assert of_moments[1].isfinite().all()


# --- Transformations and wrong arguments ----------------------------------------------------------


def small(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Five arguments and the reference, of a call of few tokens."""
    case = Case("small", L=3, before=2, B=2, H=2, K=2, G=1, M=2, d_v=2, hidden=0.0)
    query, *keys = drawn(case, dtype)
    before, own = divided(case, *keys)
    moments, reference = key_moments(*before)
    return [query, *own, moments], reference


def test_opcheck() -> None:
    given, reference = small(torch.float32)
    operator = OPERATORS.causal_attention_from_moments.default
    torch.library.opcheck(operator, (*given, reference))
    torch.library.opcheck(operator, (*(x.requires_grad_() for x in given), reference))
    given = [x.detach() for x in given]
    output, log_z, moments, _ = causal_attention_from_moments(*given, reference)
    backward = OPERATORS.causal_attention_from_moments_backward.default
    for of_moments, wanted in ((moments, [True] * 5), (None, [True, False] * 2 + [False])):
        torch.library.opcheck(
            backward, (output, of_moments, *given, reference, output, log_z, 1e-5, wanted)
        )


@pytest.mark.parametrize(
    ("number", "change", "error", "message"),
    [
        (0, lambda x: x[..., :3], RuntimeError, "query_features must have .* even number F"),
        (1, lambda x: x[:, :, :2], RuntimeError, r"logits must have shape \[B, K, S\]"),
        (1, lambda x: x.float(), TypeError, "key_features must be Double as query_features"),
        (1, lambda x: x[..., :2], RuntimeError, r"key_features must have shape \[B, K, L, F\] = "),
        (2, lambda x: x.long(), TypeError, "logits must be float64"),
        (3, lambda x: x[..., :1], RuntimeError, "value must have d_v = 2 numbers"),
        (4, lambda x: x[:, :, 1:], RuntimeError, r"E = F \(F \+ 1\) / 2 \+ 1 = 11, got"),
        (4, lambda x: x.float(), TypeError, "moments must be Double for Double features"),
    ],
)
def test_wrong_arguments_are_refused(number, change, error, message):
    given, reference = small()
    given[number] = change(given[number])
    with pytest.raises(error, match=message):
        causal_attention_from_moments(*given, reference)
    with pytest.raises(error, match=message):
        causal_attention_from_moments(*(x.to("meta") for x in (*given, reference)))
    given, reference = small()
    with pytest.raises((RuntimeError, TypeError), match="reference must be Double of shape"):
        causal_attention_from_moments(*given, reference.float())
    with pytest.raises(ValueError, match="eps must be finite and positive, got 0"):
        causal_attention_from_moments(*given, reference, eps=0.0)
    output, log_z, moments, _ = causal_attention_from_moments(*given, reference)
    with pytest.raises(RuntimeError, match="grad_all_moments must be Double of shape"):
        OPERATORS.causal_attention_from_moments_backward(
            output, moments[:1], *given, reference, output, log_z, 1e-5, [True] * 5
        )


@pytest.mark.parametrize("padding", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("count", [20, 140])
def test_float32_is_as_accurate_after_padding_with_low_logits(padding: float, count: int) -> None:
    """A mask's finite lowest value hides tokens on the left, in the first chunk or two."""
    case = Case("", L=200, before=0, hidden=0.0)
    query, key, logits, value = drawn(case)
    logits[:, :, :count] += padding
    leaves = [x.float().requires_grad_() for x in (query, key, logits, value)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = attend(case, *leaves)[0][:, :, count:]
    expected = by_pairs(case, *exact)[:, :, count:]
    assert_close(found.double(), expected, 5e-5)  # as without padding
    incoming = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).double()
    gradients = torch.autograd.grad(found, leaves, incoming.float())
    wanted = torch.autograd.grad(expected, exact, incoming)
    for name, own, other in zip(
        ("query", "key", "logits", "value"), gradients, wanted, strict=True
    ):
        assert_close(own.double(), other, 5e-4, name)


@pytest.mark.parametrize("rise", [30.0, 1000.0, 1e5])
def test_float32_is_as_accurate_where_logits_rise_within_a_chunk(rise: float) -> None:
    case = Case("", L=150, before=20, hidden=0.0)
    query, key, logits, value = drawn(case)
    logits[:, :, 90:] += rise
    narrow = [x.float() for x in (query, key, logits, value)]
    expected = by_pairs(case, *(x.double() for x in narrow))
    assert_close(attend(case, *narrow)[0].double(), expected, 5e-5)  # as without a rise


@pytest.mark.parametrize("outweighed", [0.0, 1000.0], ids=["level", "outweighed"])
@pytest.mark.parametrize("alone", [True, False], ids=["the only key", "one of many"])
def test_a_key_that_is_not_finite_is_seen_from_then_on(alone: bool, outweighed: float) -> None:
    case = Case("", L=300, before=0, B=1, H=1, K=1, G=1, hidden=0.0)
    query, key, logits, value = drawn(case)
    logits[:, :, 128:] += outweighed
    if alone:
        logits[:, :, :128] = -math.inf
    logits[:, :, 100] = math.nan
    output, _, moments, reference = attend(case, query, key, logits, value)
    assert output.isnan().all(-1).flatten().tolist() == [row >= 100 for row in range(300)]
    later = causal_attention_from_moments(
        query[:, :, 200:],
        key[:, :, 200:],
        logits[:, :, 200:],
        value[:, :, 200:],
        moments,
        reference,
    )
    assert later[0].isnan().all()
