"""Packed batches of transformers through "ikattn_implicit": each sequence as it would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from ikattn.integrations.transformers import _masks, attention, decoding_cache

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.usefixtures("float64_by_default")

LENGTHS = (5, 3, 7)
TEXTS = torch.arange(15)[None] % 11 + 1  # [1, T]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
BEGINS = torch.tensor([0, 5, 8, 15], dtype=torch.int32)
GIVEN = {"cu_seq_lens_q": BEGINS, "cu_seq_lens_k": BEGINS, "max_length_q": 7, "max_length_k": 7}


def llama(**options: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 12}
    kind = "Mistral" if "sliding_window" in options else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_attention_heads=4, num_key_value_heads=2, **options
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    return ikattn.convert(model, num_frequencies=4, seed=1)


def one_by_one(model: Any) -> Tensor:
    return torch.cat(
        [model(piece, use_cache=False).last_hidden_state for piece in TEXTS.split(LENGTHS, 1)], 1
    )


@pytest.fixture
def calls(monkeypatch):
    """How many calls went through the packed operator."""
    seen = []
    packed = attention.implicit_kernel_attention_varlen

    def counted(*args: Any, **options: Any) -> Tensor:
        seen.append(args[5].tolist())
        return packed(*args, **options)

    monkeypatch.setattr(attention, "implicit_kernel_attention_varlen", counted)
    return seen


@pytest.mark.parametrize("given", ["positions", "lengths", "both"])
def test_a_packed_row_is_its_sequences(calls, given):
    model = llama()
    options: dict[str, Any] = {} if given == "positions" else dict(GIVEN)
    options["position_ids"] = POSITIONS
    if given == "lengths":  # positions go on, as FlashAttention would take them
        options["position_ids"] = torch.arange(15)[None]
        moved = [
            model(x, position_ids=p, use_cache=False)
            for x, p in zip(
                TEXTS.split(LENGTHS, 1), options["position_ids"].split(LENGTHS, 1), strict=True
            )
        ]
        expected = torch.cat([x.last_hidden_state for x in moved], 1)
    else:
        expected = one_by_one(model)
    packed = model(TEXTS, use_cache=False, **options).last_hidden_state
    torch.testing.assert_close(packed, expected)
    assert calls == [BEGINS.tolist()] * 2
    packed.square().mean().backward()
    assert model.layers[0].self_attn.spectral.w1.grad.any()


def test_several_packed_rows(calls):
    model = llama()
    other = torch.cat([torch.arange(9), torch.arange(6)])[None]
    both = model(
        torch.cat([TEXTS, TEXTS.flip(1)]),
        position_ids=torch.cat([POSITIONS, other]),
        use_cache=False,
    ).last_hidden_state
    torch.testing.assert_close(both[:1], one_by_one(model))
    last = model(TEXTS.flip(1)[:, 9:], use_cache=False).last_hidden_state
    torch.testing.assert_close(both[1:, 9:], last)
    assert calls == [[0, 5, 8, 15, 24, 30]] * 2


def test_masks_of_other_kinds_stay_masks(calls):
    model = llama(sliding_window=2)
    packed = model(TEXTS, position_ids=POSITIONS, use_cache=False).last_hidden_state
    torch.testing.assert_close(packed, one_by_one(model))
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        model(TEXTS, position_ids=POSITIONS, use_cache=False, **GIVEN)
    model = llama()
    padding = torch.ones(1, 15, dtype=torch.long)
    padding[:, :4] = 0
    model(TEXTS, attention_mask=padding, use_cache=False)
    with pytest.raises(NotImplementedError, match="beside a mask that hides more"):
        model(TEXTS, attention_mask=padding, use_cache=False, **GIVEN)
    assert calls == []


def test_lengths_that_contradict_positions_are_refused():
    begins = torch.tensor([0, 2, 8, 15], dtype=torch.int32)
    told = {**GIVEN, "cu_seq_lens_q": begins, "cu_seq_lens_k": begins}
    with pytest.raises(ValueError, match=r"beside positions that restart at \[0, 5, 8, 15\]"):
        llama()(TEXTS, position_ids=POSITIONS, use_cache=False, **told)


def test_a_cache_of_features_keeps_sequences_apart(calls):
    model, begins = llama(), torch.tensor([0, 3, 6], dtype=torch.int32)
    told = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins}
    with torch.no_grad():
        kept = model(TEXTS[:, :6], past_key_values=decoding_cache(model, "features"), **told)
        plain = model(TEXTS[:, :6], use_cache=False, **told)
    torch.testing.assert_close(kept.last_hidden_state, plain.last_hidden_state)
    assert len(calls) == 4


def test_a_mask_is_looked_at_once_for_all_layers(monkeypatch):
    looks = []
    look_at = _masks._look_at
    monkeypatch.setattr(_masks, "_look_at", lambda mask: looks.append(1) or look_at(mask))
    llama()(TEXTS, position_ids=POSITIONS, use_cache=False)
    assert len(looks) == 1


def test_weights_of_a_packed_row_come_with_its_mask(calls):
    model = llama()
    told = model(TEXTS, position_ids=POSITIONS, use_cache=False, output_attentions=True)
    torch.testing.assert_close(told.last_hidden_state, one_by_one(model))
    assert told.attentions[0].shape == (1, 4, 15, 15)
    assert not told.attentions[0][:, :, 5:, :5].any()
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(TEXTS, use_cache=False, output_attentions=True, **GIVEN)


def test_what_lengths_must_be():
    model = llama()
    with pytest.raises(ValueError, match="cu_seq_lens_k must be given"):
        model(TEXTS, use_cache=False, cu_seq_lens_q=BEGINS)
    with pytest.raises(ValueError, match="one row of packed sequences, got 2"):
        model(TEXTS.expand(2, -1), use_cache=False, **GIVEN)
    wrong = dict(GIVEN, cu_seq_lens_q=torch.tensor([0, 5, 8, 14], dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens_q must end with 15"):
        model(TEXTS, use_cache=False, **wrong)


def test_a_training_step_of_the_flattening_collator(calls):
    model = llama()
    rows = [{"input_ids": list(range(1, length + 1))} for length in LENGTHS]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator(rows)
    batch.pop("labels")
    packed = model(**batch, use_cache=False).last_hidden_state
    alone = [
        model(torch.tensor([row["input_ids"]]), use_cache=False).last_hidden_state for row in rows
    ]
    torch.testing.assert_close(packed, torch.cat(alone, 1))
    assert len(calls) == 2


def test_torchs_context_parallelism_is_refused(monkeypatch):
    if not torch.distributed.is_available():
        pytest.skip("torch has no torch.distributed")
    from torch.distributed.tensor.experimental import _context_parallel

    wrapper = _context_parallel._attention._distribute_function
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrapper)
    with pytest.raises(RuntimeError, match=r"ikattn\.parallel\.context_parallel does the same"):
        llama()(TEXTS, use_cache=False)


def test_an_encoder_with_lengths(calls):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 12}
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, num_attention_heads=2)
    model = ikattn.convert(transformers.BertModel(config).eval(), num_frequencies=4)
    packed = model(TEXTS, position_ids=POSITIONS, **GIVEN).last_hidden_state
    alone = [model(piece).last_hidden_state for piece in TEXTS.split(LENGTHS, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))
    assert len(calls) == 1
