"""Maps as BertViz takes them; where it is installed, in its own views."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from ikattn.explain.bertviz import to_bertviz
from ikattn.maps import Batch, Layer, Recording
from recordings import encoder_recording, translation_recording
from tiny_texts import tiny_model, tiny_tokenizer


def test_each_layer_has_the_map_of_one_sequence_without_padding() -> None:
    recording = encoder_recording(batches=2)
    found = to_bertviz(recording, batch=1, sequence=1)
    assert found.keys() == {"attention", "tokens"}
    assert found["tokens"] == ["b1t0", "b1t1", "b1t2"]
    for attention, maps in zip(found["attention"], recording.batches[1].values(), strict=True):
        assert maps.weights is not None
        assert torch.equal(attention, maps.weights[1:, :, :3, :3])


@pytest.mark.parametrize("name", ["per_head", "summed", "encoder"])
def test_rows_of_norms_are_shares_unless_norms_are_wanted(name: str) -> None:
    recording = encoder_recording()
    norms = to_bertviz(recording, name, shares=False)["attention"]
    shares = to_bertviz(recording, name)["attention"]
    for own, share, maps in zip(norms, shares, recording.batches[0].values(), strict=True):
        expected = getattr(maps, name)[:1]
        assert torch.equal(own, expected if name == "per_head" else expected[:, None])
        torch.testing.assert_close(share * own.sum(-1, keepdim=True), own)
        assert share.shape[1] == (2 if name == "per_head" else 1)


def test_rows_that_hold_nothing_stay_zero_and_weights_are_not_touched() -> None:
    recording = encoder_recording(padded=False)
    for maps in recording.batches[0].values():
        assert maps.summed is not None
        maps.summed[:, 1] = 0
    assert not to_bertviz(recording, "summed")["attention"][0][0, 0, 1].any()
    weights = to_bertviz(recording, "weights")["attention"][0]
    assert not torch.allclose(weights.sum(-1), torch.ones(()))  # as a sink leaves them


def test_an_encoder_decoder_has_its_three_kinds_of_attention() -> None:
    recording = translation_recording()
    found = to_bertviz(recording, "per_head", sequence=1, shares=False)
    assert found["encoder_tokens"] == ["s0", "s1", "s2"]
    assert found["decoder_tokens"] == ["</s>", "ein", "Haus"]
    for kind in ("encoder", "decoder", "cross"):
        (attention,) = found[f"{kind}_attention"]
        expected = recording.batches[0][kind].per_head
        assert expected is not None
        assert torch.equal(attention, expected[1:, :, :3, :3])


def test_kinds_that_have_no_such_map_are_left_out() -> None:
    recording = translation_recording()
    for kind in ("decoder", "cross"):
        recording.batches[0].layers[kind].encoder = None
    assert to_bertviz(recording, "encoder").keys() == {"encoder_attention", "encoder_tokens"}
    recording.batches[0].layers["encoder"].encoder = None
    with pytest.raises(ValueError, match="the map 'encoder' was not recorded"):
        to_bertviz(recording, "encoder")


def test_a_tokenizer_names_tokens() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model, tokenizer = tiny_model("GPT2LMHeadModel"), tiny_tokenizer()
    inputs = tokenizer(["w1 w2 w3", "w4 w5"], padding=True, return_tensors="pt")
    with ikattn.record(model, maps=("weights", "per_head")) as recording, torch.no_grad():
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    found = to_bertviz(recording, sequence=1, tokens=tokenizer)
    assert found["tokens"] == ["w4", "w5"]
    torch.testing.assert_close(
        found["attention"][0].sum(-1), torch.ones(1, 2, 2, dtype=torch.float64)
    )


def without_map(recording: Recording) -> Recording:
    next(iter(recording.batches[0].layers.values())).summed = None
    return recording


def with_nan(x: Tensor) -> Tensor:
    return x.where(x < x[0].max(), torch.nan)


def with_weights(change: Callable[[Tensor], Tensor]) -> Recording:
    recording = encoder_recording()
    maps = next(iter(recording.batches[0].layers.values()))
    assert maps.weights is not None
    maps.weights = change(maps.weights)
    return recording


def of_a_cache() -> Recording:
    layer = Layer("layer", "self", "decoder", 1, "none", "torch")
    maps = ikattn.Contributions(weights=torch.ones(1, 1, 1, 4))
    return Recording("Model", ("weights",), {"layer": layer}, [Batch({"layer": maps})])


@pytest.mark.parametrize(
    ("recording", "map_", "options", "message"),
    [
        (encoder_recording(), "magnitude", {}, "map must be one of"),
        (encoder_recording(), "alti", {}, "was not recorded"),
        (encoder_recording(), "weights", {"batch": 1}, "the recording's 1 calls"),
        (encoder_recording(), "weights", {"sequence": -1}, "got 0 and -1"),
        (without_map(encoder_recording()), "summed", {}, "has no map 'summed', which others have"),
        (with_weights(lambda x: torch.cat([x, x], 1)), "weights", {}, "of one shape, got"),
        (with_weights(with_nan), "weights", {}, "must hold finite numbers, got others"),
        (of_a_cache(), "weights", {}, r"got 1 and 4: .*recording.joined\(\)"),
    ],
)
def test_what_a_view_cannot_show_is_refused(recording, map_, options, message):
    with pytest.raises(ValueError, match=message):
        to_bertviz(recording, map_, **options)


def test_a_recording_of_nothing_is_refused() -> None:
    with pytest.raises(LookupError, match="nothing was recorded"):
        to_bertviz(Recording("Model", ("weights",)))


@pytest.mark.parametrize("view", ["head_view", "model_view"])
@pytest.mark.parametrize("make", [encoder_recording, translation_recording])
@pytest.mark.parametrize("name", ["weights", "per_head", "summed"])
def test_bertviz_shows_the_numbers(view: str, make: Any, name: str) -> None:
    bertviz = pytest.importorskip("bertviz", reason="bertviz is not installed")
    arguments = to_bertviz(make(), name)
    page = getattr(bertviz, view)(**arguments, html_action="return").data
    shown = re.search(r'\{"attention": \[.*?\], "default_filter"', page)
    assert shown is not None
    parts = json.loads(shown[0].removesuffix(', "default_filter"') + "}")["attention"]
    given = [own for key, own in arguments.items() if key.endswith("attention")]
    tokens = {tuple(own) for key, own in arguments.items() if key.endswith("tokens")}
    assert len(parts) == len(given)
    for part, own in zip(parts, given, strict=True):
        assert torch.equal(torch.tensor(part["attn"]), torch.stack(own)[:, 0])
        assert {tuple(part["left_text"]), tuple(part["right_text"])} <= tokens
