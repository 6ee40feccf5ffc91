"""``ikattn.explain.faithfulness``, on a model whose answer one token makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ikattn.explain import faithfulness
from tiny_texts import tiny_model

IDS = torch.tensor([[1, 5, 3, 4, 2], [1, 3, 5, 2, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
INPUTS = {"input_ids": IDS, "attention_mask": MASK}


class Keyword(nn.Module):
    """Class 1 exactly where token 5 is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 10)
        self.embedding.weight.data = torch.eye(10)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        found = (x[..., 5] * (1 if attention_mask is None else attention_mask)).sum(-1)
        return torch.stack([1 - found, found], -1) * 10


@pytest.mark.parametrize("replace", ["mask", "zero", "drop"])
def test_the_token_that_matters_is_told_from_others(replace: Any) -> None:
    model = Keyword().eval()
    right = (IDS == 5).float()
    options: dict[str, Any] = {"replace": replace, "mask_id": 9, "shares": (0.25,)}
    options["keep"] = (IDS == 1) | (IDS == 2)
    good = faithfulness(model, INPUTS, right, **options)
    bad = faithfulness(model, INPUTS, -right, **options)
    assert good.aopc > 0.99
    assert bad.aopc < 0.01
    assert good.mean_sufficiency < 0.01 < 0.99 < bad.mean_sufficiency
    assert good.accuracy.tolist() == [0.0]
    assert bad.accuracy.tolist() == [1.0]
    low, high = good.interval()
    assert low <= good.aopc <= high
    assert good.interval() == (low, high)
    assert str(good).startswith("AOPC 1.000 (")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replace": "mask"}, "needs mask_id"),
        ({"replace": "hide"}, "replace must be"),
        ({"replace": "zero", "shares": (0.0,)}, "shares must be in"),
        ({"replace": "zero", "keep": torch.ones(2, 5, dtype=torch.bool)}, "keep must leave"),
        ({"replace": "drop", "shares": (1.0,)}, "leaves nothing of text 0"),
    ],
)
def test_what_makes_no_sense_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        faithfulness(Keyword().eval(), INPUTS, torch.rand(2, 5), **options)
    with pytest.raises(ValueError, match="scores must be"):
        faithfulness(Keyword().eval(), INPUTS, torch.rand(2, 4), replace="zero")


def test_vectors_that_the_model_takes_otherwise_than_tokens_are_refused() -> None:
    model = tiny_model("GPT2ForSequenceClassification", num_labels=3)
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
    inputs, scores = {"input_ids": ids, "attention_mask": (ids != 0).long()}, torch.rand(2, 5)
    with pytest.raises(ValueError, match="gives other logits for the vectors of its input"):
        faithfulness(model, inputs, scores, replace="zero")  # it tells padding by ids


def test_dropped_tokens_are_compared_with_the_text_alone() -> None:
    model = tiny_model("GPT2LMHeadModel")
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
    scores = torch.tensor([[5.0, 4, 3, 2, 1]] * 2)
    options = {"replace": "drop", "shares": (0.3,), "output": lambda out: out.logits[:, -1]}
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    found = faithfulness(model, inputs, scores, **options)
    alone = faithfulness(model, {"input_ids": ids[1:, :3]}, scores[1:, :3], **options)
    torch.testing.assert_close(found.comprehensiveness[1:], alone.comprehensiveness)


def test_scores_that_are_not_finite_are_refused() -> None:
    model = tiny_model("BertForSequenceClassification", num_labels=3)
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="scores must be finite, got nan"):
        faithfulness(model, {"input_ids": ids}, torch.tensor([[1.0, torch.nan, 2]]), mask_id=3)
