"""Value zeroing against blocks that run with a token's values at zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from ikattn.explain import value_zeroing
from tiny_texts import tiny_model
from tiny_transformers import build_tiny, tiny_inputs

pytest.importorskip("transformers", reason="transformers is not installed")

PROMPT = torch.tensor([[3, 14, 15, 9, 2]])


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_value_zeroing_is_what_a_block_makes_without_a_value(implementation: str) -> None:
    model = tiny_model("BertModel")
    model.set_attn_implementation(implementation)
    ids = torch.tensor([[3, 14, 15, 9, 2], [3, 4, 5, 0, 0]])
    mask = (ids != 0).long()
    found = value_zeroing(model, {"input_ids": ids, "attention_mask": mask}, together=2)
    assert float(found[:, 1, 3:].abs().max()) == float(found[:, 1, :, 3:].abs().max()) == 0
    x = model.embeddings(ids[:1])
    for layer, map_ in zip(model.encoder.layer, found, strict=True):
        y = layer(x)
        columns = []
        for j in range(5):

            def without(module: Any, args: Any, value: Tensor, j: int = j) -> Tensor:
                return value.index_fill(1, torch.tensor(j), 0)

            hook = layer.attention.self.value.register_forward_hook(without)
            columns.append(1 - torch.cosine_similarity(layer(x), y, dim=-1)[0])
            hook.remove()
        expected = torch.stack(columns, 1)
        torch.testing.assert_close(map_[0], expected / expected.sum(-1, keepdim=True))
        x = y


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "vit", "distilbert", "bloom", "gemma2", "albert"]
)
def test_value_zeroing_of_families(kind: str) -> None:
    model = build_tiny(kind)
    inputs = {name: x[:1] for name, x in tiny_inputs(model).items()}
    found = value_zeroing(model, inputs)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    if kind in ("gpt2", "llama", "bloom", "gemma2"):
        assert float(found.triu(1).abs().max()) == 0
    if kind == "gemma2":  # a window of four tokens in every second layer
        assert float(found[0].tril(-4).abs().max()) == 0


def test_rollout_of_value_zeroing() -> None:
    model = tiny_model("BertForSequenceClassification", num_labels=3)
    found = ikattn.attribute(model, PROMPT, method="rollout:value_zeroing")
    expected = ikattn.rollout(value_zeroing(model.bert, {"input_ids": PROMPT}))[:, 0]
    torch.testing.assert_close(found.scores, expected)
    with pytest.raises(ValueError, match="one stack of blocks"):
        value_zeroing(tiny_model("T5ForConditionalGeneration"), {"input_ids": PROMPT})
