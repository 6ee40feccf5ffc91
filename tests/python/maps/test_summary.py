"""Means that leave padding out, and the ledger's shares."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from ikattn.maps import Batch, head_mean, layer_mean, ledger_shares, token_mean
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.ledger import LedgerFactors, LedgerShares
from ikattn.maps.summary import layer_maps

NAMES = ("similarity", "magnitude", "value_norm", "bias")
PADDING = torch.tensor([[False] * 4, [False, False, True, True]])


def test_head_mean_is_zero_at_padding_only() -> None:
    weights = torch.rand(2, 3, 5, 4, dtype=torch.float64) + 0.1
    queries = torch.tensor([[False] * 5, [False, True, True, True, True]])
    got = head_mean(weights, query_padding=queries, key_padding=PADDING)
    torch.testing.assert_close(got[0], weights[0].mean(0))
    torch.testing.assert_close(got[1, :1, :2], weights[1, :, :1, :2].mean(0))
    assert torch.equal(got == 0, queries.unsqueeze(2) | PADDING.unsqueeze(1))


def test_layer_mean_of_a_batch_averages_heads_too() -> None:
    weights = torch.rand(2, 2, 3, 4, 4, dtype=torch.float64)
    batch = Batch(
        {f"{n}": Contributions(weights=x, key_padding=PADDING) for n, x in enumerate(weights)}
    )
    expected = weights.mean((0, 2)).masked_fill(PADDING.unsqueeze(1), 0)
    torch.testing.assert_close(layer_mean(batch, map="weights"), expected)
    each = layer_maps(batch, map="weights")
    torch.testing.assert_close(torch.stack(each).mean(0), expected)
    torch.testing.assert_close(layer_mean(weights, key_padding=PADDING), expected)
    torch.testing.assert_close(
        layer_mean(batch, map="weights", layers=["1"]),
        weights[1].mean(1).masked_fill(PADDING.unsqueeze(1), 0),
    )


def test_token_mean_counts_what_is_not_padding() -> None:
    values = torch.rand(2, 3, 4, dtype=torch.float64)
    values[1, :, 2:] = math.nan
    got = token_mean(values, PADDING)
    torch.testing.assert_close(got[0], values[0].mean(-1))
    torch.testing.assert_close(got[1], values[1, :, :2].mean(-1))
    assert token_mean(torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool)).isnan().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: head_mean(torch.zeros(2, 4, 4)), r"x must have shape \[B, H, L, S\].*\[2, 4, 4\]"),
        (lambda: head_mean(torch.zeros(2, 1, 4, 4), key_padding=PADDING[:, :2]), "key_padding"),
        (lambda: token_mean(torch.zeros(4)), "values"),
        (lambda: token_mean(torch.zeros(2, 4), PADDING.int()), "padding must be bool.*int32"),
        (lambda: layer_mean([]), "layer_mean: maps must hold"),
        (lambda: ledger_shares(Contributions()), "weights must have shape.*got None"),
        (
            lambda: ledger_shares(replace(ledger(), magnitude=None)),
            r"magnitude must have shape \[2, 3, 6\].*got None: record with the ledger",
        ),
        (
            lambda: ledger_shares(replace(ledger(), value_norms=torch.ones(2, 1, 6))),
            r"value_norms must have shape \[2, 3, 6\].*got \[2, 1, 6\]",
        ),
    ],
)
def test_errors_name_the_argument(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def ledger(
    similarity: Tensor | None = None,
    magnitude: Tensor | None = None,
    value_norms: Tensor | None = None,
    bias: Tensor | None = None,
    visible: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Contributions:
    """A layer of 2 sequences, 3 heads, 5 queries, 6 keys; factors not given vary at random."""
    generator = torch.Generator().manual_seed(3)

    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 3 + 0.05

    similarity = positive(2, 3, 5, 6) if similarity is None else similarity
    magnitude = positive(2, 3, 6) if magnitude is None else magnitude
    value_norms = positive(2, 3, 6) if value_norms is None else value_norms
    product = similarity * magnitude.unsqueeze(-2)
    if bias is not None:
        product = product * bias.exp()
    if visible is not None:
        product = product.masked_fill(~visible, 0)
    weights = product / product.sum(-1, keepdim=True)
    return Contributions(
        weights=weights.to(dtype),
        similarity=similarity.to(dtype),
        magnitude=magnitude.to(dtype),
        value_norms=value_norms.to(dtype),
    )


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def every_share(shares: LedgerShares) -> list[LedgerFactors]:
    return [shares.per_head, shares.per_token, shares.per_head_and_token]


VISIBLE = torch.ones(5, 6, dtype=torch.bool).tril(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("visible", [None, VISIBLE])
def test_shares_add_up_to_one_and_deviations_to_the_influence(visible, dtype):
    shares = ledger_shares(ledger(visible=visible, dtype=dtype))
    for share in every_share(shares):
        torch.testing.assert_close(share.total(), torch.ones_like(share.bias))
    torch.testing.assert_close(shares.deviation.total(), shares.influence, rtol=0, atol=1e-12)
    assert shares.pairs.eq(30 if visible is None else int(visible.sum())).all()
    # Nothing but the three factors: what is left for a bias is rounding.
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert all(share.bias.abs().max() < bound for share in every_share(shares))


def test_shares_and_deviations_are_those_of_a_plain_loop() -> None:
    layer = ledger(visible=VISIBLE, bias=torch.rand(2, 3, 5, 6, dtype=torch.float64))
    shares = ledger_shares(layer)
    weights, similarity, magnitude, norms = (
        x.tolist() for x in (layer.weights, layer.similarity, layer.magnitude, layer.value_norms)
    )
    b, h = 1, 2
    names = (*NAMES, "contribution")
    deviation: dict[str, dict[tuple[int, int], float]] = {name: {} for name in names}
    for i in range(5):
        keys = [j for j in range(6) if j <= i + 1]
        logs = {
            "similarity": [math.log(similarity[b][h][i][j]) for j in keys],
            "magnitude": [math.log(magnitude[b][h][j]) for j in keys],
            "value_norm": [math.log(norms[b][h][j]) for j in keys],
            "contribution": [math.log(weights[b][h][i][j] * norms[b][h][j]) for j in keys],
        }
        logs["bias"] = [
            c - s - m - n for s, m, n, c in zip(*(logs[name] for name in logs), strict=True)
        ]
        for name, values in logs.items():
            for j, value in zip(keys, values, strict=True):
                deviation[name][i, j] = value - sum(values) / len(values)
    total = deviation["contribution"]
    for name in NAMES:
        parts = {pair: x * total[pair] for pair, x in deviation[name].items()}
        share = sum(parts.values()) / sum(x * x for x in total.values())
        assert getattr(shares.per_head, name)[b, h] == pytest.approx(share, rel=1e-9)
        for j in range(6):
            column = [pair for pair in total if pair[1] == j]
            share = sum(parts[pair] for pair in column) / sum(total[pair] ** 2 for pair in column)
            found = getattr(shares.per_head_and_token, name)[b, h, j]
            assert found == pytest.approx(share, rel=1e-9)
            mean = sum(deviation[name][pair] for pair in column) / len(column)
            assert getattr(shares.deviation, name)[b, h, j] == pytest.approx(mean, abs=1e-12)
    assert shares.variance[b, h] == pytest.approx(sum(x * x for x in total.values()) / len(total))


CONSTANT = {
    "similarity": ones(2, 3, 5, 6) * 0.7,
    "magnitude": ones(2, 3, 6) * 5,
    "value_norms": ones(2, 3, 6) * 0.01,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("varying", CONSTANT)
def test_the_only_factor_that_varies_has_the_whole_share(varying: str, dtype: torch.dtype) -> None:
    constant = {name: x for name, x in CONSTANT.items() if name != varying}
    shares = ledger_shares(ledger(**constant, dtype=dtype))
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-5}
    name = varying.removesuffix("s")
    for share in (shares.per_head, shares.per_token):
        torch.testing.assert_close(getattr(share, name), torch.ones_like(share.bias), **tolerance)
        for other in set(NAMES) - {name}:
            torch.testing.assert_close(
                getattr(share, other), torch.zeros_like(share.bias), **tolerance
            )
    torch.testing.assert_close(getattr(shares.deviation, name), shares.influence, **tolerance)


def test_a_bias_has_a_share_of_its_own() -> None:
    bias = torch.linspace(-1, 1, 6, dtype=torch.float64).expand(2, 3, 5, 6)
    shares = ledger_shares(ledger(**CONSTANT, bias=bias))
    torch.testing.assert_close(shares.per_head.bias, ones(2, 3))
    torch.testing.assert_close(shares.influence, (bias - bias.mean(-1, keepdim=True)).mean(-2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_that_varies_leaves_nothing_to_share(dtype: torch.dtype) -> None:
    shares = ledger_shares(ledger(**CONSTANT, dtype=dtype))
    lone = ledger_shares(ledger(visible=torch.eye(5, 6, dtype=torch.bool), dtype=dtype))
    for found in (shares, lone):
        for share in every_share(found):
            assert all(not getattr(share, name).any() for name in NAMES)
        assert found.variance.max() < 1e-10
    assert lone.pairs.eq(5).all()


def test_masked_and_padded_pairs_do_not_count_whatever_they_hold() -> None:
    short = ledger()
    # Sequence 1 has 4 tokens; keys 4, 5 and query 4 are padding, full of NaN.
    cut = ledger_shares(
        ledger(
            short.similarity[1:, :, :4, :4],
            short.magnitude[1:, :, :4],
            short.value_norms[1:, :, :4],
        )
    )
    keys = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    queries = torch.tensor([[False] * 5, [False] * 4 + [True]])
    hidden = keys[:, None, None, :] | queries[:, None, :, None]
    layer = ledger(visible=~hidden.expand(2, 3, 5, 6) | queries[:, None, :, None])
    padded = replace(
        layer,
        weights=layer.weights.masked_fill(hidden, math.nan),
        similarity=short.similarity.masked_fill(hidden, math.nan),
        magnitude=short.magnitude.masked_fill(keys.unsqueeze(1), math.inf),
        value_norms=short.value_norms.masked_fill(keys.unsqueeze(1), 0),
        query_padding=queries,
        key_padding=keys,
    )
    shares = ledger_shares(padded)
    assert shares.pairs.tolist() == [[30] * 3, [16] * 3]
    assert not shares.left_out.any()
    for name in NAMES:
        torch.testing.assert_close(getattr(shares.per_head, name)[1:], getattr(cut.per_head, name))
        found = getattr(shares.per_head_and_token, name)[1:]
        torch.testing.assert_close(found[..., :4], getattr(cut.per_head_and_token, name))
        assert not found[..., 4:].any()
    assert not shares.influence[1, :, 4:].any()


def test_pairs_whose_factors_left_their_range_are_counted_apart() -> None:
    layer = ledger()
    layer.similarity[0, 1, 2, 3] = 0
    layer.similarity[0, 1, 4, 3] = 1e-310  # subnormal: few digits are left
    layer.magnitude[1, 0, 5] = math.inf
    shares = ledger_shares(layer)
    assert shares.left_out.tolist() == [[0, 2, 0], [5, 0, 0]]
    assert (shares.pairs + shares.left_out).eq(30).all()
    for share in every_share(shares):
        assert share.total().isfinite().all()
    torch.testing.assert_close(shares.per_head.total(), ones(2, 3))


@pytest.mark.parametrize("kernel", ["dot", "implicit"])
def test_ledger_of_real_attention_has_no_bias(kernel: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 7, 8, dtype=torch.float64)
    w1, w2 = torch.randn(2, 2, 8, 4, dtype=torch.float64) * 0.1
    if kernel == "dot":
        similarity, magnitude = ikattn.ops.similarity_and_magnitude(q, k)
        weights = (q @ k.mT / math.sqrt(8)).softmax(-1)
    else:
        similarity, magnitude = ikattn.ops.similarity_and_magnitude(
            q, k, kernel="implicit", w1=w1, w2=w2
        )
        weights = ikattn.implicit_kernel_weights(q, k, w1, w2)
    norms = torch.rand(1, 2, 7, dtype=torch.float64) + 0.1
    layer = Contributions(
        weights=weights, similarity=similarity, magnitude=magnitude, value_norms=norms
    )
    shares = ledger_shares(layer)
    assert shares.per_head.bias.abs().max() < 1e-9
    assert shares.left_out.sum() == 0
    torch.testing.assert_close(shares.per_head.total(), ones(1, 2))
