"""Families of transformers that no table knows: recorded by what flows, against explicit sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agreement import assert_close
from families import ALONE, POST, PRE
from ikattn.maps.contribution_maps import Contributions
from ikattn.recorder import record
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.plan.run_maps import Surroundings
from ikattn.recorder.runs import making
from tiny_transformers import build_tiny, tiny_inputs

pytest.importorskip("transformers", reason="transformers is not installed")

# Post-norm encoders, whose second norm is found, too.
SECOND = ("ernie", "layoutlm", "markuplm", "roc_bert", "splinter", "bert-generation")
TOLERANCE = 1e-9


def vectors(call: AttentionCall, projection: Tensor) -> Tensor:
    """a_ij^h W_O^h v_j^h, summed over the heads, [B, L, S, D]."""
    value = call.value.repeat_interleave(call.query.size(1) // call.value.size(1), 1)
    heads = projection.unflatten(1, (call.query.size(1), -1))
    return torch.einsum("bhts,bhsd,ehd->btse", call.weights, value, heads)


def explicit(call: AttentionCall, projection: Tensor, around: Surroundings) -> Tensor:
    """N_Res, from vectors of every pair."""
    y = vectors(call, projection)
    if around.scale is not None:
        y = y * around.scale
    if around.output_norm is not None:
        stats = around.output_norm
        y = y - y.mean(-1, keepdim=True) if stats.centered else y
        y = y * stats.weight / stats.scale[:, :, None, None]
    assert around.residual is not None
    L, S = y.shape[1:3]
    rows = torch.arange(L)
    keys = rows + call.diagonal
    y[:, rows[keys < S], keys[keys < S]] += around.residual[:, keys < S]
    return y.norm(dim=-1)


@pytest.mark.parametrize("kind", [*PRE, *POST, *ALONE])
def test_maps_of_a_family_that_is_found_by_running(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny(kind)
    seen: list[tuple[AttentionCall, Tensor, Surroundings, Contributions]] = []
    make_maps = making.make_maps

    def noting(call: AttentionCall, projection: Tensor, around: Surroundings, wanted: Any) -> Any:
        maps = make_maps(call, projection, around, wanted)
        seen.append((call, projection, around, maps))
        return maps

    monkeypatch.setattr(making, "make_maps", noting)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = model(**inputs)[0]
        with record(model, maps="all", check="all") as recording:
            found = model(**inputs)[0]
    torch.testing.assert_close(found, expected)
    blocks = {layer.block for layer in recording.layers.values()}
    assert blocks >= ({"post"} if kind in POST else {"none"} if kind in ALONE else {"pre"})
    if kind in SECOND:
        assert all(maps.encoder is not None for maps in recording.batches[0].values())
    for call, projection, around, maps in seen:
        there = torch.ones(call.sizes[0], call.sizes[2], dtype=torch.bool)
        if call.query_padding is not None:
            there = ~call.query_padding
        hidden = torch.zeros(call.sizes[0], call.sizes[3], dtype=torch.bool)
        hidden = hidden if call.key_padding is None else call.key_padding
        pairs = there[:, :, None] & ~hidden[:, None]
        norms = vectors(call, projection).norm(dim=-1)
        assert maps.summed is not None
        assert_close(maps.summed[pairs], norms[pairs], TOLERANCE, "summed")
        if maps.with_residual is not None:
            norms = explicit(call, projection, around)
            assert_close(maps.with_residual[pairs], norms[pairs], TOLERANCE, "with_residual")
