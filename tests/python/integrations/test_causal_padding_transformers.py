"""Causal models with padding: causality and the keys' padding are told apart, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agreement import assert_close
from ikattn.integrations.transformers import _masks, attention, decoding_cache
from transformers_models import IMPLICIT_TOLERANCE as TOLERANCE
from transformers_models import build, convert

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.usefixtures("float64_by_default")

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
SHOWN = {
    "right": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
    "left": torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
    "holes": torch.tensor([[0, 1, 0, 1, 1, 0], [1, 1, 0, 1, 1, 1]]),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the operator, filled as models run."""
    made: list[dict[str, Any]] = []
    of_ranks = attention.attention_function

    def attention_function() -> Any:
        def attend(*tensors: Tensor, **options: Any) -> Tensor:
            made.append(options)
            return of_ranks()(*tensors, **options)  # type: ignore[no-any-return]

        return attend

    monkeypatch.setattr(attention, "attention_function", attention_function)
    return made


def is_told_apart(options: dict[str, Any]) -> bool:
    mask = options.get("attn_mask")
    return bool(options.get("is_causal")) and mask is not None and mask.stride(-2) == 0


def results(model: Any, **inputs: Any) -> list[Tensor]:
    """Every output of a call, and every gradient of one of its numbers."""
    model.zero_grad()
    state = model(**inputs)[0]
    state.square().sum().backward()
    return [state, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("side", SHOWN)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bart", "whisper"])
def test_results_are_those_of_the_mask_of_pairs(family, side, calls, monkeypatch):
    model = convert(build(family))
    inputs = {"input_ids": TOKENS, "attention_mask": SHOWN[side]}
    if family in ("bart", "whisper"):
        inputs = {"decoder_input_ids": TOKENS, "decoder_attention_mask": SHOWN[side]}
        of_encoder = torch.randn(2, 4, 12) if family == "whisper" else TOKENS
        inputs["input_features" if family == "whisper" else "input_ids"] = of_encoder
    found = results(model, **inputs)
    assert any(is_told_apart(options) for options in calls)
    monkeypatch.setattr(attention, "padding_of_causal", lambda *_: None)
    calls.clear()
    expected = results(model, **inputs)
    assert not any(is_told_apart(options) for options in calls)
    for got, want in zip(found, expected, strict=True):  # rows of padding among them
        assert_close(got, want, TOLERANCE)


@pytest.mark.parametrize("cache", ["dynamic", "features", "static"])
def test_generation_is_that_of_the_mask_of_pairs(cache, calls, monkeypatch):
    model = convert(build("llama", head="ForCausalLM"))
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}

    def generated() -> Tensor:
        if cache == "static":
            options["cache_implementation"] = "static"
            options["disable_compile"] = True
        if cache == "features":
            options["past_key_values"] = decoding_cache(model, "features")
        return model.generate(TOKENS, attention_mask=SHOWN["left"], **options)  # type: ignore[no-any-return]

    found = generated()
    # few queries take kept features
    assert any(is_told_apart(call) for call in calls) == (cache != "features")
    monkeypatch.setattr(attention, "padding_of_causal", lambda *_: None)
    assert torch.equal(found, generated())


def test_weights_that_are_asked_for_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(build("llama"))
    inputs = {"input_ids": TOKENS, "attention_mask": SHOWN["left"], "output_attentions": True}
    with torch.no_grad():
        found = model(**inputs).attentions
        monkeypatch.setattr(attention, "padding_of_causal", lambda *_: None)
        expected = model(**inputs).attentions
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, TOLERANCE)
        assert not got[0, :, :3].any()  # what left padding sees


def mask_of(**changes: Any) -> Tensor:
    """A mask as a model makes it."""
    convert(build("bert"))  # registers
    functions = transformers.masking_utils
    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 6, "kv_length": 6}
    sizes |= {"mask_function": functions.causal_mask_function, "attention_mask": SHOWN["left"] > 0}
    make = transformers.AttentionMaskInterface()["ikattn_implicit"]
    return make(**sizes | changes)  # type: ignore[no-any-return]


def test_nothing_else_is_taken_for_it() -> None:
    functions = transformers.masking_utils
    others = {
        "window": {"mask_function": functions.sliding_window_causal_mask_function(3)},
        "after keys of a cache": {"kv_length": 8, "q_offset": 2},
        "offset on the device": {"q_offset": torch.tensor(0)},
        "window of a cache": {"kv_offset": 1, "q_offset": 1},
        "one query": {"q_length": 1},
        "own function": {"use_vmap": True},
    }
    for name, changes in others.items():
        mask = mask_of(**changes)
        assert _masks.padding_of_causal(mask, mask.size(3)) is None, name
    mask = mask_of()
    assert _masks.padding_of_causal(mask.clone(), 6) is None
    assert _masks.padding_of_causal(mask[:, :, 1:], 6) is None
    assert _masks.padding_of_causal(mask[1:], 6) is None
    assert _masks.padding_of_causal(mask[..., 1:], 5) is None
    mask[0, 0, 5, 4] = False  # no longer what was made
    assert _masks.padding_of_causal(mask, 6) is None
    with torch.inference_mode():  # where nobody counts changes
        assert _masks.padding_of_causal(mask_of(), 6) is None


def test_windows_packed_rows_and_masks_of_users_stay_as_they_are(calls):
    with torch.no_grad():
        model = convert(build("mistral"))
        model(TOKENS, attention_mask=SHOWN["left"])
        model = convert(build("llama"))
        model(TOKENS, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]] * 2))
        model(TOKENS, attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool).tril(-1))
    assert not any(is_told_apart(options) for options in calls)


def test_masks_are_not_kept() -> None:
    before = len(_masks._OF_CAUSAL)
    mask = mask_of()
    assert len(_masks._OF_CAUSAL) == before + 1
    del mask
    assert len(_masks._OF_CAUSAL) == before
