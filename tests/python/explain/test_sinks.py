"""Sinks: much weight, little part in what a head moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ikattn.explain import sinks
from ikattn.maps import Recording
from ikattn.maps.contribution_maps import Contributions
from recorded_models import recorded
from recordings import recording_of

TOKENS = ["[CLS]", "it", "was", "."]


def recording(weights: Tensor, norms: Tensor, padding: Tensor | None = None) -> Recording:
    """One layer "a" of one call."""
    maps = {"weights": weights, "value_norms": norms}
    paddings = {"query_padding": padding, "key_padding": padding}
    return recording_of({"a": Contributions(**maps, **paddings)}, heads=weights.size(1))


def example() -> tuple[Tensor, Tensor]:
    """Two sequences and heads; [CLS] is a sink of head 1 of both, the full stop of sequence 1."""
    weights = torch.full((2, 2, 4, 4), 0.25, dtype=torch.float64)
    weights[:, 1] = torch.tensor([0.7, 0.1, 0.1, 0.1])
    weights[1, 0] = torch.tensor([0.1, 0.2, 0.2, 0.5])
    norms = torch.full((2, 2, 4), 2.0, dtype=torch.float64)
    norms[:, :, 0] = 0.2
    norms[1, 0, 3] = 0.5
    return weights, norms


def test_numbers_are_those_of_explicit_sums() -> None:
    found = sinks(recording(*example()), [TOKENS] * 2).table()
    by_place = {(sink.head, sink.token): sink for sink in found}
    assert set(by_place) == {(None, "[CLS]"), (None, "."), (1, "[CLS]"), (0, ".")}
    cls = by_place[1, "[CLS]"]
    moved, others = 0.7 * 0.2, 3 * 0.1 * 2.0
    assert cls.rate == 1
    assert cls.weight == pytest.approx(0.7)
    assert cls.part == pytest.approx(moved / (moved + others))
    assert cls.norm == pytest.approx(0.1)
    assert cls.suppressed == pytest.approx(1 - (moved + others) / (others / 0.3))
    assert by_place[None, "[CLS]"].rate == 0.5  # one of two heads
    assert by_place[0, "."].rate == 0.5  # one of two sequences
    assert by_place[0, "."].norm == pytest.approx(0.5 / ((0.2 + 2 + 2) / 3))


def test_parts_of_a_corpus_add_and_padding_does_not_count() -> None:
    weights, norms = example()
    alone = [sinks(recording(weights[b : b + 1], norms[b : b + 1]), TOKENS) for b in range(2)]
    longer = torch.nn.functional.pad(weights, (0, 2, 0, 2), value=torch.nan)
    padding = torch.tensor([[False] * 4 + [True] * 2] * 2)
    whole = sinks(recording(longer, torch.nn.functional.pad(norms, (0, 2)), padding), [TOKENS] * 2)
    for one, other in zip((alone[0] + alone[1]).table(), whole.table(), strict=True):
        assert one[:3] == other[:3]
        assert one[3:] == pytest.approx(other[3:])
    assert str(whole).splitlines()[1].split()[:2] == ["a", "[CLS]"]
    assert not sinks(recording(weights, norms * 0 + 1), [TOKENS] * 2).table()


def test_a_sink_that_a_model_learns_is_a_column() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 16, "num_local_experts": 2}
    config = transformers.GptOssConfig(vocab_size=40, num_experts_per_tok=1, **sizes)
    torch.manual_seed(0)
    model = transformers.GptOssModel(config).eval()
    model.layers[0].self_attn.sinks.data.fill_(5.0)
    made = recorded(model, torch.arange(5, 11)[None], ("weights", "value_norms"))
    rest = 1 - made[0].weights[0].sum(-1).mean(-1)  # [H]
    assert rest.min() > 0.5
    found = [sink for sink in sinks(made).table() if sink.token == "(sink)"]
    assert [sink.head for sink in found] == [None, 0, 1, 2, 3]
    assert [sink.weight for sink in found[1:]] == pytest.approx(rest.tolist())
    assert [sink.suppressed for sink in found[1:]] == pytest.approx(rest.tolist())
    assert all(sink.part == sink.norm == 0 for sink in found)


def test_what_is_missing_is_named() -> None:
    weights, norms = example()
    lacking = recording(weights, norms)
    lacking.batches[0].layers["a"] = Contributions(weights=weights)
    with pytest.raises(ValueError, match=r"layer 'a' must have weights .* and value norms"):
        sinks(lacking, [TOKENS] * 2)
    with pytest.raises(ValueError, match="must hold layers with queries and keys, got none"):
        sinks(Recording("Model", ("weights",)))
