"""Messages when a config of transformers leaves the implicit kernel under way."""

from __future__ import annotations

import pytest
import torch

from transformers_models import build, convert, inputs_of

pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.usefixtures("float64_by_default")


def test_a_switch_under_way_is_told_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = convert(build("bert")), inputs_of("bert")
    model(**inputs)
    assert not caplog.records
    model.config._attn_implementation = "eager"  # as code of a library does
    for _ in range(2):
        model(**inputs)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert 'BertSelfAttention runs the attention "eager" and not its implicit kernel' in (
        record.getMessage()
    )
    assert f"since {__file__}, line " in record.getMessage()
    model.set_attn_implementation("ikattn_implicit")
    model(**inputs)
    assert len(caplog.records) == 1


def test_whisper_with_timestamps_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = convert(build("whisper", head="ForConditionalGeneration"))
    model.generation_config.alignment_heads = [[0, 0]]
    model.generation_config.no_timestamps_token_id = 25
    model.generate(
        torch.randn(1, 4, 12),
        return_token_timestamps=True,
        return_timestamps=True,
        max_new_tokens=2,
    )
    messages = [record.getMessage() for record in caplog.records if record.name == "ikattn"]
    assert any("generation_whisper.py, line " in message for message in messages)
