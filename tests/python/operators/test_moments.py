"""Moments of keys, attention from them, their gradients and what torch does to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, assert_identical
from drawing import for_moments
from ikattn.ops import (
    attention_from_moments,
    causal_attention_from_moments,
    key_moments,
    merge_moments,
)

OPERATORS = torch.ops.ikattn


class Case(NamedTuple):
    """Sizes of a call, letters as in ikattn.ops.moments."""

    name: str
    B: int = 2
    H: int = 4
    K: int = 4
    G: int = 4
    L: int = 5
    S: int = 70
    M: int = 4
    d_v: int = 6
    hidden: float = 0.3

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("short"),
    Case("grouped", K=2, G=1, L=70),
    Case("one frequency", M=1, d_v=1, S=65, L=1),
    Case("blocks of tokens, panels of values", B=1, H=2, K=2, G=1, S=300, L=200, M=7, d_v=70),
    Case("entries of many panels", B=1, H=2, K=1, G=1, S=130, L=66, M=33, d_v=5),
    Case("no values", d_v=0),
]


def drawn(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Features of queries and keys, logits, values. Hidden keys hold NaN."""
    query, key, logits, value = for_moments(case, case.S, case.S + case.M)
    key = key.masked_fill(logits.isneginf().unsqueeze(-1), math.nan)
    return tuple(x.to(dtype) for x in (query, key, logits, value))


def by_moments(query: Tensor, key: Tensor, logits: Tensor, value: Tensor) -> Tensor:
    return attention_from_moments(query, *key_moments(key, logits, value))[0]


def causally(query: Tensor, *keys: Tensor) -> Tensor:
    """Makes moments of the first keys, and goes on from them in two calls."""
    sizes = [keys[0].size(2) - query.size(2), 2, query.size(2) - 2]
    before, first, rest = zip(*(x.split(sizes, 2) for x in keys), strict=True)
    queries = query.split(sizes[1:], 2)
    output, _, *state = causal_attention_from_moments(queries[0], *first, *key_moments(*before))
    return torch.cat([output, causal_attention_from_moments(queries[1], *rest, *state)[0]], 2)


each_form = pytest.mark.parametrize("attend", [by_moments, causally])


@pytest.mark.operators
def test_any_strides_are_read_as_they_lie() -> None:
    leaves = [x.nan_to_num(0.0, 0.0, -torch.inf).requires_grad_() for x in drawn(CASES[1])]
    query, key, logits, value = leaves
    strided = [x.mT.contiguous().mT for x in (query, key, logits, value)]
    strided[0] = query.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    found = by_moments(*strided)
    assert_close(found, by_moments(*leaves), 1e-14)
    direction = torch.randn(found.shape[::-1], dtype=found.dtype).permute(3, 2, 1, 0)
    of_query, *others = torch.autograd.grad(found, [strided[0], *leaves[1:]], direction)
    expected = torch.autograd.grad(by_moments(*leaves), leaves, direction.contiguous())
    for own, truth in zip((of_query, *others), expected, strict=True):
        assert_close(own, truth, 1e-12)


def test_the_entries_are_products_of_two_features_and_one() -> None:
    _, key, logits, value = drawn(Case("entries", B=1, H=1, K=1, G=1, S=3, M=2, hidden=0))
    moments, reference = key_moments(key, logits, value)
    entries = [key[0, 0, :, b] * key[0, 0, :, (b + r) % 4] for r in range(3) for b in range(4)][:10]
    psi = torch.stack([*entries, torch.ones_like(entries[0])])
    weights = (logits - reference.unsqueeze(-1)).exp()[0, 0]
    rows = torch.cat([value[0, 0], torch.ones(3, 1, dtype=torch.float64)], 1)
    assert_close(moments[0, 0], (psi * weights) @ rows, 1e-14)


def test_log_normalizers_are_those_of_the_attention_operator() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    w1, w2 = (0.1 * torch.randn(2, 8, 4, dtype=torch.float64) for _ in range(2))
    phi_q, phi_k = (ikattn.ops.spectral_features(x, w1, w2) for x in (q, k))
    logits = k.square().sum(-1) / (2 * math.sqrt(8))
    output, log_z = attention_from_moments(phi_q, *key_moments(phi_k, logits, v))
    expected, expected_log_z = OPERATORS.implicit_kernel_attention(q, k, v, w1, w2)
    assert_close(output, expected, 1e-12)
    assert_close(log_z, expected_log_z, 1e-13)


@pytest.mark.operators
def test_bits_do_not_depend_on_threads() -> None:
    query, key, logits, value = drawn(CASES[4], torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            moments, reference = key_moments(key, logits, value)
            output, log_z = attention_from_moments(query, moments, reference)
            grads = OPERATORS.attention_from_moments_backward(
                output, query, moments, reference, output, log_z, 1e-5, [True, True]
            )
            of_keys = OPERATORS.key_moments_backward(
                grads[1], key, logits, value, reference, [True, True, True]
            )
            found.append([moments, output, log_z, *grads, *of_keys])
    finally:
        torch.set_num_threads(before)
    assert_identical(*found)


@pytest.mark.operators
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cut", [0, 30, 64])
def test_keys_are_added_in_place(case: Case, cut: int) -> None:
    _, key, logits, value = drawn(case)
    logits = logits + torch.arange(case.S)
    moments, reference = key_moments(key[:, :, :cut], logits[:, :, :cut], value[:, :, :cut])
    version = moments._version
    rest = key[:, :, cut:], logits[:, :, cut:], value[:, :, cut:]
    OPERATORS.add_key_moments_(moments, reference, *rest)
    expected = key_moments(key, logits, value)
    assert_close(moments, expected[0], 1e-12)
    assert torch.equal(reference, expected[1])
    assert moments._version > version
    with pytest.raises(RuntimeError, match="no gradient would reach"):
        OPERATORS.add_key_moments_(moments, reference, *rest[:2], rest[2].requires_grad_())


@pytest.mark.operators
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,)])
def test_gradients_one_by_one_are_those_of_all(wanted: tuple[int]) -> None:
    _, key, logits, value = drawn(CASES[1])
    moments, reference = key_moments(key, logits, value)
    grad = torch.randn_like(moments)
    every = OPERATORS.key_moments_backward(grad, key, logits, value, reference, [True] * 3)
    flags = [i in wanted for i in range(3)]
    some = OPERATORS.key_moments_backward(grad, key, logits, value, reference, flags)
    assert torch.equal(some[wanted[0]], every[wanted[0]])
    assert all(some[i].numel() == 0 for i in range(3) if i not in wanted)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_compositions_in_blocks_are_the_kernels(case: Case) -> None:
    """Compositions run on devices without kernels."""
    query, key, logits, value = drawn(case)
    key = key.nan_to_num(0.0)  # of hidden ones, for the comparison below
    explicit = torch._C.DispatchKey.CompositeExplicitAutograd

    def both(name: str, *arguments: object) -> tuple[Tensor, ...]:
        operator = getattr(OPERATORS, name).default
        found = operator._op_dk(explicit, *arguments)
        for own, expected in zip(found, operator(*arguments), strict=True):
            assert_close(own, expected, 1e-11, name)
        return tuple(found)

    moments, reference = both("key_moments", key, logits, value)
    output, log_z = both("attention_from_moments", query, moments, reference)
    grad = torch.randn_like(output)
    _, grad_moments = both(
        "attention_from_moments_backward",
        *(grad, query, moments, reference, output, log_z, 1e-5, [True, True]),
    )
    grown = [x.clone() for x in (moments, reference)]
    OPERATORS.add_key_moments_.default._op_dk(explicit, *grown, key, logits, value)
    assert_close(grown[0], 2 * moments, 1e-12)
    both("key_moments_backward", grad_moments, key, logits, value, reference, [True] * 3)


# --- Transformations and wrong arguments ----------------------------------------------------------


def test_wrong_keys_and_moments_are_refused() -> None:
    query, key, logits, value = drawn(CASES[0])
    moments, reference = key_moments(key, logits, value)
    short, attend = moments[:, :, 1:], attention_from_moments
    of_meta, *meta = (x.to("meta") for x in (key, logits, value))
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: attend(query, moments.float(), reference), TypeError, "for Double .* got Float"),
        (lambda: attend(query, short, reference), RuntimeError, r"F \(F \+ 1\) / 2 \+ 1 = 37, got"),
        (lambda: attend(query, moments, reference, eps=0.0), ValueError, "eps must be .* got 0"),
        (lambda: attend(query, moments, reference.float()), RuntimeError, "reference must"),
        (lambda: merge_moments(moments, reference, short, reference), RuntimeError, "other_mom"),
        (lambda: key_moments(key, logits.long(), value), TypeError, "logits must be float64"),
        (lambda: key_moments(key[..., :3], logits, value), RuntimeError, "even number F"),
        (lambda: key_moments(key, logits[:, :1], value), RuntimeError, r"\[B, K, S\] = \[2, 4"),
        (lambda: key_moments(key, logits, value[:, :3]), RuntimeError, "that divide K = 4"),
        (lambda: key_moments(of_meta[..., :3], *meta), RuntimeError, "even number F"),
        (lambda: key_moments(of_meta, meta[0][:, :1], meta[1]), RuntimeError, r"= \[2, 4"),
        (lambda: key_moments(of_meta, meta[0], meta[1][:, :3]), RuntimeError, "that divide K = 4"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()


class _Module(torch.nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = attend


@each_form
def test_gradients_of_both_orders_are_those_of_small_differences(attend):
    case = Case("check", B=1, H=2, K=2, G=1, L=4, S=6, M=2, d_v=2, hidden=0)
    leaves = [x.requires_grad_() for x in drawn(case)]
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


@each_form
def test_vmap_functional_gradients_and_export_go_through_compositions(attend):
    arguments = drawn(Case("vmap", B=3, hidden=0))
    expected = attend(*arguments)
    stacked = torch.func.vmap(lambda *x: attend(*(y.unsqueeze(0) for y in x)).squeeze(0))
    assert_close(stacked(*arguments), expected, 1e-12)
    gradient = torch.func.grad(lambda v: attend(*arguments[:3], v).sum())(arguments[3])
    value = arguments[3].clone().requires_grad_()
    (right,) = torch.autograd.grad(attend(*arguments[:3], value).sum(), value)
    assert_close(gradient, right, 1e-12)
    program = torch.export.export(_Module(attend), arguments)
    program = program.run_decompositions(ikattn.ops.decompositions())
    assert "ikattn" not in str(program.graph)
    assert_close(program.module()(*arguments), expected, 1e-11)


@each_form
def test_autocast_lowers_no_feature_sum_or_product_of_compositions(attend):
    query, key, logits, value = (x.nan_to_num().float() for x in drawn(CASES[0]))
    moments, reference = key_moments(key, logits, value)
    arguments = torch.randn_like(moments), key, logits, value, reference, [True] * 3
    expected = OPERATORS.key_moments_backward(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(query.bfloat16(), key.bfloat16(), logits, value).dtype == torch.float32
        assert key_moments(key.bfloat16(), logits, value)[0].dtype == torch.float32
        assert_identical(OPERATORS.key_moments_backward(*arguments), expected)
        with pytest.raises(RuntimeError, match=r"torch\.vmap do not work under autocast"):
            torch.vmap(lambda q: attend(q, key, logits, value))(query[None])


def test_opcheck() -> None:
    query, key, logits, value = drawn(Case("opcheck", K=2, G=1, S=20), torch.float32)
    key = key.nan_to_num(0.0)
    operator = OPERATORS.key_moments.default
    torch.library.opcheck(operator, (key, logits, value))
    torch.library.opcheck(operator, tuple(x.requires_grad_() for x in (key, logits, value)))
    moments, reference = (x.detach() for x in key_moments(key, logits, value))
    operator = OPERATORS.attention_from_moments.default
    torch.library.opcheck(operator, (query.requires_grad_(), moments.requires_grad_(), reference))
    torch.library.opcheck(
        OPERATORS.add_key_moments_.default,
        (moments.detach().clone(), reference, key.detach(), logits.detach(), value.detach()),
    )
    torch.library.opcheck(OPERATORS.merge_moments.default, (moments, reference) * 2)
    output, log_z = (x.detach() for x in attention_from_moments(query, moments, reference))
    query, moments, key, logits, value = (x.detach() for x in (query, moments, key, logits, value))
    torch.library.opcheck(
        OPERATORS.attention_from_moments_backward.default,
        (output, query, moments, reference, output, log_z, 1e-5, [True, False]),
    )
    torch.library.opcheck(
        OPERATORS.key_moments_backward.default,
        (moments, key, logits, value, reference, [True, False, True]),
    )


def test_a_key_that_is_seen_and_not_finite_reaches_every_query() -> None:
    query, key, logits, value = drawn(Case("poison", hidden=0))
    logits[0, 0, 3] = math.nan
    output = by_moments(query, key, logits, value)
    assert output[0, 0].isnan().all()
    assert output[0, 1:].isfinite().all()
    assert output[1].isfinite().all()


def test_what_cannot_be_added_to_is_refused_before_anything_is_written() -> None:
    _, key, logits, value = (x.nan_to_num() for x in drawn(CASES[0]))
    moments, reference = key_moments(key, logits, value)
    add, keys = OPERATORS.add_key_moments_, (key, logits, value)
    with pytest.raises(RuntimeError, match="moments must have a place in memory for each number"):
        add(moments[:1].expand_as(moments), reference.clone(), *keys)
    with torch.inference_mode():
        frozen = moments.clone()
    before = frozen.clone()
    with pytest.raises(RuntimeError, match="must be ordinary tensors outside of"):
        add(frozen, reference, *keys)
    assert_identical(frozen, before)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(key, torch.ones_like(key))
        with pytest.raises(RuntimeError, match="no gradient would reach what requires one"):
            add(moments, reference, dual, logits, value)
    with pytest.raises(ValueError, match="eps must be at least"):
        attention_from_moments(key.float(), moments.float(), reference, eps=1e-50)
