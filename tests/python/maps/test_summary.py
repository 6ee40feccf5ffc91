"""Means that leave padding out, and the ledger's shares."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from ikattn.maps import Batch, head_mean, layer_mean, shares, token_mean
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.ledger import FACTORS, Shares, Split
from ikattn.maps.summary import layer_maps

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
        (lambda: split(Contributions()), "weights of layer 'a' must have shape.*got None: record"),
        (
            lambda: split(replace(ledger(), magnitude=None)),
            r"magnitude of layer 'a' must have shape \[2, 3, 6\].*got None: record with the ledger",
        ),
        (
            lambda: split(replace(ledger(), value_norms=torch.ones(2, 1, 6))),
            r"value_norms of layer 'a' must have shape \[2, 3, 6\].*got \[2, 1, 6\]",
        ),
        (lambda: shares({}), "shares: maps must hold layers with queries and keys, got none"),
        (
            lambda: split(Contributions(reduced={"weights": torch.ones(2, 3)})),
            "shares: maps of layer 'a' were reduced",
        ),
        (
            lambda: shares({"a": ledger()}) + shares({"a": of_heads(ledger(), slice(2))}),
            "layer 'a' must have 3 heads in both, got 2",
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


def split(layer: Contributions) -> Split:
    return shares({"a": layer})["a"]


def of_heads(layer: Contributions, heads: slice) -> Contributions:
    names = ("weights", "similarity", "magnitude", "value_norms")
    return replace(layer, **{name: getattr(layer, name)[:, heads] for name in names})


VISIBLE = torch.ones(5, 6, dtype=torch.bool).tril(1)


def test_covariances_are_those_of_a_plain_loop() -> None:
    layer = ledger(visible=VISIBLE, bias=torch.rand(2, 3, 5, 6, dtype=torch.float64))
    weights, similarity, magnitude, norms = (
        x.tolist() for x in (layer.weights, layer.similarity, layer.magnitude, layer.value_norms)
    )
    h, sums, variance = 2, torch.zeros(4, 4, dtype=torch.float64), 0.0
    for b in range(2):
        for i in range(5):
            keys = range(min(6, i + 2))
            rows = [
                [math.log(similarity[b][h][i][j]) for j in keys],
                [math.log(magnitude[b][h][j]) for j in keys],
                [math.log(norms[b][h][j]) for j in keys],
            ]
            rows.append([math.log(weights[b][h][i][j]) - rows[0][j] - rows[1][j] for j in keys])
            sums += torch.tensor(rows, dtype=torch.float64).cov(correction=0)
            of_row = [math.log(weights[b][h][i][j] * norms[b][h][j]) for j in keys]
            variance += float(torch.tensor(of_row, dtype=torch.float64).var(correction=0))
    found = split(layer)
    assert found.rows.tolist() == [10, 10, 10]
    torch.testing.assert_close(found.covariance[h], sums / 10, rtol=1e-12, atol=1e-12)
    assert float(found.variance[h]) == pytest.approx(variance / 10, rel=1e-10)
    torch.testing.assert_close(found.shares.sum(-1), ones(3), rtol=0, atol=1e-12)
    expected = sums[1, 2] / (sums[1, 1] * sums[2, 2]).sqrt()
    assert float(found.correlation[h, 1, 2]) == pytest.approx(float(expected))


def test_parts_of_a_corpus_add_up_in_blocks_of_rows_of_any_size(monkeypatch) -> None:
    layer = ledger(visible=VISIBLE)
    whole = shares({"a": layer, "b": of_heads(layer, slice(2))})
    names = ("weights", "similarity", "magnitude", "value_norms")
    parts = [
        replace(layer, **{name: getattr(layer, name)[b : b + 1] for name in names})
        for b in range(2)
    ]
    monkeypatch.setattr("ikattn.maps.ledger._PAIRS_AT_ONCE", 20)
    added = sum((shares({"a": one, "b": of_heads(one, slice(2))}) for one in parts), Shares())
    for name in ("a", "b"):
        for one, other in zip(vars(added[name]).values(), vars(whole[name]).values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert whole.model.rows == 50
    expected = whole["a"].sums.sum(0) + whole["b"].sums.sum(0)
    torch.testing.assert_close(whole.model.covariance, expected / 50)
    rows = whole.table()
    assert [(row["layer"], row["head"]) for row in rows[:3]] == [
        (None, None),
        ("a", None),
        ("a", 0),
    ]
    assert sum(rows[0][name] for name in FACTORS) == pytest.approx(1)


CONSTANT = {
    "similarity": ones(2, 3, 5, 6) * 0.7,
    "magnitude": ones(2, 3, 6) * 5,
    "value_norms": ones(2, 3, 6) * 0.01,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("varying", FACTORS)
def test_the_only_factor_that_varies_has_the_whole_share(varying: str, dtype: torch.dtype) -> None:
    given = {name: x for name, x in CONSTANT.items() if name.removesuffix("s") != varying}
    if varying == "bias":
        given["bias"] = torch.linspace(-1, 1, 6, dtype=torch.float64).expand(2, 3, 5, 6)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[:, FACTORS.index(varying)] = 1
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-5}
    torch.testing.assert_close(split(ledger(**given, dtype=dtype)).shares, expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_that_varies_leaves_nothing_to_share(dtype: torch.dtype) -> None:
    found = split(ledger(**CONSTANT, dtype=dtype))
    assert not found.variance.any()
    assert found.shares.isnan().all()
    lone = split(ledger(visible=torch.eye(5, 6, dtype=torch.bool), dtype=dtype))
    assert not lone.rows.any()
    assert lone.variance.isnan().all()


def test_masked_and_padded_pairs_do_not_count_whatever_they_hold() -> None:
    short = ledger()
    # Sequence 1 has 4 tokens; keys 4, 5 and query 4 are padding, full of NaN.
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
    cut = ledger(
        short.similarity[1:, :, :4, :4], short.magnitude[1:, :, :4], short.value_norms[1:, :, :4]
    )
    names = ("weights", "similarity", "magnitude", "value_norms")
    first = Contributions(**{name: getattr(layer, name)[:1] for name in names})
    expected, found = split(first) + split(cut), split(padded)
    assert found.rows.tolist() == [9, 9, 9]
    assert not found.left_out.any()
    torch.testing.assert_close(found.sums, expected.sums)


def test_pairs_whose_factors_left_their_range_are_counted_apart() -> None:
    layer = ledger()
    layer.similarity[0, 1, 2, 3] = 0
    layer.similarity[0, 1, 4, 3] = 1e-310  # subnormal: few digits are left
    layer.magnitude[1, 0, 5] = math.inf
    found = split(layer)
    assert found.left_out.tolist() == [5, 2, 0]
    torch.testing.assert_close(found.shares.sum(-1), ones(3))


@pytest.mark.parametrize("kernel", ["dot", "implicit"])
def test_the_ledger_of_a_recorded_layer_adds_up(kernel: str) -> None:
    torch.manual_seed(0)
    layer = ikattn.MultiheadAttention(16, 2, kernel=kernel, batch_first=True).double().eval()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    with torch.no_grad(), ikattn.record(layer, maps=("ledger",)) as recording:
        layer(x, x, x, key_padding_mask=padding)
    maps = recording[0]
    expected = 0.0
    for b, size in enumerate((7, 5)):
        of_pairs = (maps.weights * maps.value_norms[:, :, None])[b, :, :size, :size]
        expected = expected + of_pairs.log().var(-1, correction=0).sum(-1)
    found = shares(recording)[0]
    rows = found.rows[0]
    torch.testing.assert_close(found.variance, expected / rows, rtol=0, atol=1e-10)
    assert found.shares[:, 3].abs().max() < 1e-9  # nothing is left for a bias
    assert not found.left_out.any()
