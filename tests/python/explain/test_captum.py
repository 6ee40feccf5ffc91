"""Attributions called as captum's methods are; where captum is, as its own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close
from ikattn.explain.captum import ALTILogit, DecompX, Rollout, _chosen
from tiny_texts import tiny_model

pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
MASK = (IDS != 0).long()
INPUTS = {"input_ids": IDS, "attention_mask": MASK}
TOLERANCE = 1e-12


def scores(model: nn.Module, inputs: Any, target: Any, **options: Any) -> Tensor:
    return ikattn.attribute(model, inputs, target, **options).scores


@pytest.fixture
def classifier() -> Any:
    return tiny_model("BertForSequenceClassification", num_labels=3)


@pytest.mark.parametrize(
    ("target", "classes"),
    [(2, [2, 2]), (torch.tensor(2), [2, 2]), ([0, 2], [0, 2]), (torch.tensor([1, 0]), [1, 0])],
    ids=str,
)
def test_classes_are_chosen_as_captum_has_it(classifier, target, classes):
    found = DecompX(classifier).attribute(IDS, target, MASK)
    assert_close(found, scores(classifier, INPUTS, classes), TOLERANCE)
    assert not found[MASK == 0].any()


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ((3,), None),
        ((3, 5), 4),
        ((3, 5), -1),
        ((3, 5), (2,)),
        ((3, 5), [0, 4, 2]),
        ((3, 5), torch.tensor([0, 4, 2])),
        ((3, 5), torch.tensor(1)),
        ((3, 5), torch.tensor([1])),
        ((3, 4, 5), (1, 2)),
        ((3, 4, 5), (-1, 2)),
        ((3, 4, 5), [(0, 1), (3, 4), (2, 2)]),
    ],
    ids=str,
)
def test_targets_mean_what_they_mean_to_captum(shape: tuple[int, ...], target: Any) -> None:
    common = pytest.importorskip("captum._utils.common", reason="captum is not installed")
    output = torch.randn(shape)
    assert torch.equal(_chosen(output, target), common._select_targets(output, target))


@pytest.mark.parametrize("target", [(1, 2), [(1, 2), (1, 2)], (-3, 2)], ids=str)
def test_a_place_in_the_logits_of_tokens_is_a_tuple(target: Any) -> None:
    model = tiny_model("BertForTokenClassification", num_labels=3)
    found = DecompX(model).attribute(IDS, target=target, additional_forward_args=(MASK,))
    assert_close(found, scores(model, INPUTS, (1, 2)), TOLERANCE)


def test_each_example_may_have_its_own_place() -> None:
    model = tiny_model("GPT2LMHeadModel")
    found = DecompX(model).attribute(IDS, [(1, 7), (0, 10)])
    for b, (position, token) in enumerate(((1, 7), (0, 10))):
        expected = scores(model, IDS[b : b + 1], (position, token))
        assert_close(found[b : b + 1], expected, TOLERANCE)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (lambda model: DecompX(model, activation="tangent"), "decompx"),
        (ALTILogit, "alti_logit"),
        (Rollout, "rollout:alti"),
        (lambda model: Rollout(model, "value_zeroing"), "rollout:value_zeroing"),
    ],
)
def test_every_method_gives_its_own_scores(method: Any, name: str) -> None:
    model, options = tiny_model("GPT2LMHeadModel"), {"method": name}
    if name == "decompx":
        options["activation"] = "tangent"
    found = method(model).attribute(IDS[:1], (3, 11))
    assert_close(found, scores(model, IDS[:1], (3, 11), **options), TOLERANCE)


class Wrapped(nn.Module):
    """A classifier whose forward gives a number for each example, as captum's users write it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor | None = None, label: int = 0) -> Any:
        return self.model(ids, attention_mask=mask).logits[:, label]


def test_a_module_that_gives_numbers_needs_no_target(classifier: Any) -> None:
    found = DecompX(Wrapped(classifier).eval()).attribute(IDS, additional_forward_args=(MASK, 2))
    assert_close(found, scores(classifier, INPUTS, 2), TOLERANCE)


class Translation(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, decoder_input_ids: Tensor, input_ids: Tensor) -> Any:
        return self.model(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits


def test_an_output_of_one_number_needs_no_target() -> None:
    model = tiny_model("BertForSequenceClassification", num_labels=1)
    assert_close(DecompX(model).attribute(IDS), scores(model, IDS, 0), TOLERANCE)


def test_inputs_of_an_encoder_decoder_are_told_by_their_names() -> None:
    model = tiny_model("T5ForConditionalGeneration")
    source, target = IDS[:1], IDS[:1] + 20  # of one length
    inputs = {"input_ids": source, "decoder_input_ids": target}
    expected = ikattn.attribute(model, inputs, (2, 9))
    assert expected.prefix_scores is not None
    found = DecompX(Translation(model).eval()).attribute((target, source), (2, 9))
    assert isinstance(found, tuple)
    assert_close(found[0], expected.prefix_scores, TOLERANCE)
    assert_close(found[1], expected.scores, TOLERANCE)
    of_source = DecompX(model).attribute(source, (2, 9), (None, target))
    assert_close(of_source, expected.scores, TOLERANCE)


class Shortened(Wrapped):
    def forward(self, ids: Tensor, mask: Tensor | None = None, label: int = 0) -> Any:
        return super().forward(ids[:, :-1], mask, label)


def test_inputs_of_another_length_than_blocks_read_are_refused(classifier: Any) -> None:
    with pytest.raises(ValueError, match=r"must be what ids hold.*got 'ids' of shape \[2, 4\]"):
        DecompX(Shortened(classifier).eval()).attribute(IDS)


def test_a_function_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"Rollout: forward_func must be a torch.nn.Module.*got fun"
    ):
        Rollout(lambda ids: ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("inputs", [torch.rand(2, 4, 16), torch.rand(2, 4), torch.tensor([1, 2])])
def test_inputs_that_are_no_ids_are_refused(classifier: Any, inputs: Tensor) -> None:
    with pytest.raises(ValueError, match=r"DecompX: inputs must be ids of tokens.*\[B, S\]"):
        DecompX(classifier).attribute(inputs, 0)


@pytest.mark.parametrize("target", [None, 3, -4, True, 1.0, [0], [0, 1, 2], (0, 1), [(0,), (0, 1)]])
def test_targets_that_the_output_has_not_are_refused(classifier: Any, target: Any) -> None:
    with pytest.raises(ValueError, match=r"target must be a place in the output \[2, 3\]"):
        DecompX(classifier).attribute(IDS, target, MASK)


def test_a_second_input_that_no_block_reads_is_refused(classifier: Any) -> None:
    with pytest.raises(ValueError, match=r"what input_ids hold.*got 'attention_mask'"):
        DecompX(classifier).attribute((IDS, MASK), 0)


def test_captum_takes_the_methods_for_its_own_and_shows_scores(classifier: Any) -> None:
    attr = pytest.importorskip("captum.attr", reason="captum is not installed")
    pytest.importorskip("IPython", reason="captum shows texts by IPython")
    method = DecompX(classifier)
    assert isinstance(method, attr.Attribution)
    assert not method.has_convergence_delta()
    found = method.attribute(IDS, 1, MASK)
    gradients = attr.LayerIntegratedGradients(
        lambda ids, mask: classifier(ids, attention_mask=mask).logits, classifier.bert.embeddings
    )
    of_captum = gradients.attribute(IDS, target=1, additional_forward_args=MASK).sum(-1)
    assert of_captum.shape == found.shape
    record = attr.visualization.VisualizationDataRecord(
        found[0], 0.5, 1, 1, 1, found[0].sum(), ["w1", "w2", "w3", "w4"], 0.0
    )
    assert "w3" in attr.visualization.visualize_text([record]).data
