"""Calls that reduced maps and chosen rows refuse, and who refuses them: a sentence each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ikattn
from ikattn.maps import Groups, TopK, rollout
from ikattn.recorder import record
from recorded_models import attention, encoder, recorded

pytestmark = pytest.mark.usefixtures("float64_by_default")


@pytest.mark.parametrize("options", [{"reduce": "columns"}, {"queries": [5, 4, 3, 2, 1, 0]}])
def test_what_needs_whole_maps_refuses_in_a_sentence(tmp_path: Path, options: Any) -> None:
    recording = recorded(encoder(), torch.randn(2, 6, 16), ("weights", "encoder"), **options)
    assert len(recording.batches) == 1
    assert recording.names == ["layers.0.self_attn", "layers.1.self_attn"]
    what = f"record without {next(iter(options))}="
    uses = {
        "to_html": lambda: recording.to_html(tmp_path / "maps.html"),
        "plot": lambda: recording.plot(tmp_path / "maps.png"),
        "joined": recording.joined,
        "rollout": lambda: rollout(recording),
        "attention_flow": lambda: ikattn.explain.attention_flow(recording, 0),
        "token_importance": lambda: ikattn.maps.token_importance(recording, 0, layer=0),
    }
    for name, use in uses.items():
        with pytest.raises(ValueError, match=what) as caught:
            use()
        assert name in ("to_html", "plot") or str(caught.value).startswith(name)
    assert list(tmp_path.iterdir()) == []
    assert what in recording._repr_html_()


def test_alti_plus_refuses_chosen_rows() -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
    with torch.no_grad(), record(model, "alti", queries=slice(0, 2)) as recording:
        model(torch.randn(1, 5, 16), torch.randn(1, 3, 16))
    with pytest.raises(ValueError, match=r"alti_plus: .* record without queries="):
        ikattn.explain.alti_plus(recording)


# --- Bad input


def test_diagonal_of_cross_attention_is_refused_by_name() -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
    words = r"'diagonal' is not defined for decoder.*cross-attention"
    with pytest.raises(ValueError, match=words), record(model, "summed", reduce="diagonal"):
        pass
    x = torch.randn(1, 5, 16)
    inputs = {"query": torch.randn(1, 3, 16), "key": x, "value": x}
    with pytest.raises(ValueError, match="not defined for MultiheadAttention"):
        recorded(attention(batch_first=True), inputs, "summed", reduce="diagonal")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reduce": "rows"}, ValueError, r"'columns', 'diagonal', 'top_k'.* got 'rows'"),
        ({"reduce": 3}, TypeError, "reduce must be one of"),
        ({"reduce": TopK}, TypeError, "reduce must be one of"),
        ({"queries": 3}, TypeError, "queries must be a slice or a list of whole numbers, got 3"),
        ({"queries": [0.5]}, TypeError, "got \\[0.5\\]"),
        ({"queries": "12"}, TypeError, "got '12'"),
        ({"queries": slice(0.5)}, TypeError, "queries must be a slice"),
        ({"queries": slice(0, 3, 0)}, TypeError, "queries must be a slice"),
        ({"queries": []}, ValueError, "queries must name at least one"),
    ],
)
def test_arguments_are_refused_before_the_model_runs(options, error, words):
    with pytest.raises(error, match=words), record(encoder(), **options):
        pass


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"queries": [0, 9]}, ValueError, r"\[-4, 4\), the queries of layers.0.* got \[0, 9\]"),
        ({"queries": [3, -1]}, ValueError, "each query once"),
        ({"reduce": Groups([[7]])}, ValueError, r"keys must be in \[-4, 4\)"),
        ({"reduce": Groups(torch.tensor([0, 1]))}, ValueError, r"must be \[4\] or \[1, 4\]"),
        ({"reduce": lambda rows, first: None}, TypeError, "must return a tensor, got NoneType"),
        ({"reduce": lambda rows, first: rows.sum(-2)}, ValueError, "a result for each row"),
    ],
)
def test_what_does_not_fit_a_call_is_refused_by_it(options, error, words):
    with pytest.raises(error, match=words):
        recorded(encoder(), torch.randn(1, 4, 16), "summed", **options)


def test_reductions_refuse_what_they_are_not() -> None:
    for k in (0, True, 1.5):
        with pytest.raises(ValueError, match="TopK: k must be"):
            TopK(k)  # type: ignore[arg-type]
    for groups, error in (
        ([], ValueError),
        ("ab", TypeError),
        ([3], TypeError),
        ([["a"]], TypeError),
        (torch.tensor([-1, -1]), ValueError),
        (torch.rand(3), ValueError),
    ):
        with pytest.raises(error, match="Groups: "):
            Groups(groups)  # type: ignore[arg-type]


def test_layers_over_graphs_are_no_maps_of_rows() -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    model, words = geometric.GATConv(4, 4), "must be None for layers that attend over a graph"
    with pytest.raises(ValueError, match=words), record(model, reduce="columns"):
        pass
