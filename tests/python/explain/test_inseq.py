"""Attributions as methods of inseq; what does not need inseq is tested without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ikattn
from agreement import assert_close
from ikattn.explain.inseq import METHODS, PaddedIds, register, step_scores
from tiny_texts import tiny_model, tiny_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed")

FLOAT32 = 1e-6  # inseq keeps scores in float32
IDS = torch.tensor([[5, 17, 8, 23, 31, 9]])
DECODER_METHODS = [m for m in METHODS if m.partition(":")[2] not in ("encoder", "with_norm")]


def one_at_a_time(model: Any, ids: torch.Tensor, t: int, method: str) -> torch.Tensor:
    """Scores ``[t]`` of the tokens before token t, from a prompt of these alone."""
    found = ikattn.attribute(model, ids[:, :t], target=[int(ids[0, t])], method=method)
    return found.scores[0, :t].float()


@pytest.mark.parametrize("method", DECODER_METHODS)
def test_scores_of_each_step_are_those_of_its_prompt(method: str) -> None:
    model = tiny_model("GPT2LMHeadModel")
    target = PaddedIds(IDS, torch.ones_like(IDS))
    found = step_scores(model, method, None, target, 3, 6)
    assert found.source is None
    for row, t in enumerate((3, 4, 5)):
        assert_close(found.target[0, row, :t], one_at_a_time(model, IDS, t, method), FLOAT32)
        assert not found.target[0, row, t:].any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_scores_and_changes_none(side: str) -> None:
    model = tiny_model("GPT2LMHeadModel")
    alone = step_scores(model, "decompx", None, PaddedIds(IDS, torch.ones_like(IDS)), 1, 6).target
    longer = torch.arange(4, 12)[None]
    padding = (2, 0) if side == "left" else (0, 2)
    mask = torch.nn.functional.pad(torch.ones_like(IDS), padding)
    ids = torch.cat([torch.nn.functional.pad(IDS, padding), longer])
    tokens = PaddedIds(ids, torch.cat([mask, torch.ones_like(longer)]))
    found = step_scores(model, "decompx", None, tokens, 1, 8).target
    at = mask[0].nonzero()[:, 0]
    assert_close(found[0][at[1:] - 1][:, at], alone[0], FLOAT32)
    assert found[1].isfinite().all()
    nothing_predicts = [0, 1] if side == "left" else [5, 6]
    assert found[0, nothing_predicts].isnan().all()
    assert not found[0].nan_to_num()[:, mask[0] == 0].any()


def test_an_encoder_decoder_has_scores_of_both() -> None:
    model = tiny_model("T5ForConditionalGeneration")
    source = torch.tensor([[5, 6, 7, 2, 0], [8, 9, 10, 11, 2]])
    target = torch.tensor([[1, 12, 13, 2], [1, 14, 2, 0]])
    found = step_scores(
        model, "decompx", PaddedIds(source, source != 0), PaddedIds(target, target != 0), 1, 4
    )
    assert found.source is not None
    for b, (S, T) in enumerate(((4, 4), (5, 3))):
        for t in range(1, T):
            expected = ikattn.attribute(
                model,
                {"input_ids": source[b : b + 1, :S], "decoder_input_ids": target[b : b + 1, :t]},
                target=[int(target[b, t])],
            )
            assert expected.prefix_scores is not None
            assert_close(found.source[b, t - 1, :S], expected.scores[0].float(), FLOAT32)
            own = expected.prefix_scores[0, :t].float()
            assert_close(found.target[b, t - 1, :t], own, FLOAT32)
    assert not found.source[0, :, 4].any()
    assert found.source[1, 2].isnan().all()


def test_options_reach_the_method() -> None:
    model, target = tiny_model("GPT2LMHeadModel"), PaddedIds(IDS, torch.ones_like(IDS))
    found = step_scores(model, "decompx", None, target, 5, 6, activation="tangent").target[0, 0]
    expected = ikattn.attribute(model, IDS, slice(5, 6), activation="tangent").scores[0]
    assert_close(found, expected.float(), FLOAT32)


def test_a_model_that_reads_what_comes_after_is_refused() -> None:
    model = tiny_model("BertLMHeadModel", is_decoder=False)
    with pytest.raises(ValueError, match="reads tokens after the one"):
        step_scores(model, "decompx", None, PaddedIds(IDS, torch.ones_like(IDS)), 2, 4)


def test_without_inseq_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "inseq", None)
    register.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="needs inseq: pip install inseq"):
        register()


# --- With inseq


def loaded(kind: str, method: str = "ikattn_decompx", padding_side: str = "left") -> Any:
    inseq = pytest.importorskip("inseq", reason="inseq is not installed")
    register()
    return inseq.load_model(tiny_model(kind), method, tokenizer=tiny_tokenizer(padding_side))


def test_inseq_knows_the_methods() -> None:
    inseq = pytest.importorskip("inseq", reason="inseq is not installed")
    assert register() == register()
    listed = inseq.list_feature_attribution_methods()
    assert [listed.count(f"ikattn_{method}") for method in METHODS] == [1] * len(METHODS)


@pytest.mark.parametrize("method", DECODER_METHODS)
def test_inseq_attributes_a_decoder(method: str) -> None:
    model = loaded("GPT2LMHeadModel", f"ikattn_{method}")
    options = {"show_progress": False, "step_scores": ["logit"]}
    output = model.attribute("w1 w2 w3", "w1 w2 w3 w4 w5", **options)
    (own,) = output.sequence_attributions
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert own.source_attributions is None
    assert own.target_attributions.shape == (5, 2)
    assert (own.attr_pos_start, own.attr_pos_end) == (3, 5)
    for column, t in enumerate((3, 4)):
        expected = one_at_a_time(model.model, ids, t, method)
        assert_close(own.target_attributions[:t, column], expected, FLOAT32)
        value = ikattn.attribute(model.model, ids, slice(t, t + 1)).value
        assert_close(own.step_scores["logit"][column], value[0].float(), FLOAT32)
    assert output.info["attribution_method"] == f"ikattn_{method}"
    assert output.info["attributed_fn"] == "logit_fn"


@pytest.mark.parametrize("attribute_target", [False, True])
def test_inseq_attributes_a_translation(attribute_target: bool) -> None:
    model = loaded("T5ForConditionalGeneration", padding_side="right")
    texts = (["w1 w2 w3 </s>", "w9 w8 </s>"], ["w4 w5 </s>", "w6 </s>"])
    output = model.attribute(*texts, attribute_target=attribute_target, show_progress=False)
    source = ([5, 6, 7, 2], [13, 12, 2])
    target = ([1, 8, 9, 2], [1, 10, 2])
    for own, s, t in zip(output.sequence_attributions, source, target, strict=True):
        inputs = {"input_ids": torch.tensor([s]), "decoder_input_ids": torch.tensor([t])}
        found = ikattn.attribute(model.model, inputs, slice(1, len(t)), each=True)
        assert [token.id for token in own.source] == s
        assert_close(own.source_attributions, found.scores[0].mT.float(), FLOAT32)
        if attribute_target:
            assert found.prefix_scores is not None
            prefix = own.target_attributions.nan_to_num()
            assert_close(prefix, found.prefix_scores[0].mT.float(), FLOAT32)
        else:
            assert own.target_attributions is None


def test_a_span_of_a_translation_is_attributed() -> None:
    model = loaded("T5ForConditionalGeneration", padding_side="right")
    options = {"attr_pos_start": 2, "attr_pos_end": 3, "show_progress": False}
    output = model.attribute("w1 w2 </s>", "w4 w5 w6 </s>", **options)
    own = output[0].source_attributions
    inputs = {"input_ids": torch.tensor([[5, 6, 2]])}
    inputs["decoder_input_ids"] = torch.tensor([[1, 8, 9, 10, 2]])
    found = ikattn.attribute(model.model, inputs, slice(2, 3), each=True)
    assert_close(own[:, 0], found.scores[0, 0].float(), FLOAT32)


def test_outputs_are_shown_saved_and_aggregated(tmp_path: Path) -> None:
    inseq = pytest.importorskip("inseq", reason="inseq is not installed")
    model = loaded("GPT2LMHeadModel")
    output = model.attribute("w1 w2 w3", "w1 w2 w3 w4 w5", show_progress=False)
    assert "w3" in output.show(display=False, return_html=True)
    output.save(tmp_path / "scores.json")
    again = inseq.FeatureAttributionOutput.load(tmp_path / "scores.json")
    scores = output[0].target_attributions
    torch.testing.assert_close(again[0].target_attributions, scores, equal_nan=True)
    span = output.aggregate("spans", target_spans=[(0, 2)])
    assert span[0].target_attributions.shape[0] == 4


def test_functions_other_than_the_logit_are_refused() -> None:
    model = loaded("GPT2LMHeadModel")
    texts, options = ("w1 w2", "w1 w2 w3"), {"show_progress": False}
    plain = model.attribute(*texts, **options)[0].target_attributions
    logit = model.attribute(*texts, attributed_fn="logit", **options)[0].target_attributions
    torch.testing.assert_close(logit, plain, equal_nan=True)
    tangent = model.attribute(*texts, activation="tangent", **options)[0].target_attributions
    assert not torch.allclose(tangent, plain, equal_nan=True)
    with pytest.raises(ValueError, match='must be "logit" or left out'):
        model.attribute(*texts, attributed_fn="entropy", **options)


def test_other_methods_of_inseq_work_beside_ours() -> None:
    model = loaded("GPT2LMHeadModel")
    output = model.attribute("w1 w2", "w1 w2 w3", method="saliency", show_progress=False)
    assert output[0].target_attributions.shape[:2] == (3, 1)
