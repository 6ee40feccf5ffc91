"""Gates of causal models of transformers: with every cache, padded, saved, recorded, trained."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close

transformers = pytest.importorskip("transformers")

KINDS = ("llama", "gpt2")


def drawn(kind: str = "llama", **options: Any) -> tuple[Any, Tensor]:
    """A model whose gates differ by token, and ids [2, 23]."""
    torch.manual_seed(0)
    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, **heads, vocab_size=50)
        model: Any = transformers.LlamaForCausalLM(config)
    else:
        sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50}
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        )
    options = {"num_frequencies": 4, "p": None, "forget": True} | options
    model = ikattn.convert(model.double(), **options).eval()
    for name, x in model.named_parameters():
        if "forget" in name:
            nn.init.normal_(x, 0.0 if "weight" in name else 1.0, 1.0)
    return model, torch.randint(1, 50, (2, 23))


@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "features", "state"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_forgets_the_same_with_every_cache(kind: str, cache: Any) -> None:
    model, ids = drawn(kind)
    whole = model(ids).logits
    kept = transformers.DynamicCache(config=model.config)
    if cache is not None:
        kept = ikattn.decoding_cache(model, kind=cache)
    cuts = [0, 9, 13, *range(14, 24)]
    parts = [model(ids[:, i:j], past_key_values=kept).logits for i, j in pairwise(cuts)]
    assert_close(torch.cat(parts, 1), whole, 1e-12)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if cache is None:
        kept = {"cache_implementation": "static"}
    else:
        kept = {"cache": ikattn.decoding_cache(model, kind=cache)}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, **kept))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_nothing(kind: str, left: bool) -> None:
    model, ids = drawn(kind)
    blank, shown = ids.new_zeros(2, 5), torch.ones_like(ids)
    both = (blank, ids) if left else (ids, blank)
    mask = torch.cat([blank, shown] if left else [shown, blank], 1)
    places = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(torch.cat(both, 1), attention_mask=mask, position_ids=places).logits
    assert_close(logits[:, 5:] if left else logits[:, :23], model(ids).logits, 1e-12)


@torch.no_grad()
def test_what_is_hidden_has_no_gate() -> None:
    model, ids = drawn()
    shown = torch.ones_like(ids)
    shown[:, 5:9] = 0
    kept = shown[0].bool()
    places = (shown.cumsum(1) - 1).clamp_min(0)
    whole = model(ids[:, kept]).logits
    given = {"attention_mask": shown, "position_ids": places}
    assert_close(model(ids, **given).logits[:, kept], whole, 1e-12)
    cache = ikattn.decoding_cache(model, kind="state")
    assert_close(model(ids, **given, past_key_values=cache).logits[:, kept], whole, 1e-12)
    embedded = model.model.embed_tokens(ids)
    embedded[:, :4] = torch.nan
    shown = (torch.arange(23) >= 4).long().expand(2, -1)
    for kind in ("features", "state"):
        cache = ikattn.decoding_cache(model, kind=kind)
        logits = model(inputs_embeds=embedded, attention_mask=shown, past_key_values=cache).logits
        assert logits[:, 4:].isfinite().all()


@torch.no_grad()
def test_later_tokens_that_a_mask_shows_count_in_full() -> None:
    model, ids = drawn()
    mask, found = torch.ones(2, 1, 23, 23, dtype=torch.bool), []
    for _ in range(2):
        with ikattn.record(model, maps=("weights",)) as recording:
            model(ids, attention_mask=mask)
        later = recording[0].weights.triu()
        found.append(later / later.sum(-1, keepdim=True))
        gates = model.model.layers[0].self_attn.spectral.forget
        nn.init.zeros_(gates.weight)
        nn.init.constant_(gates.bias, 1e4)  # gates of 1
    assert_close(found[0], found[1], 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gates_are_recorded_saved_and_trained(kind: str, tmp_path: Path) -> None:
    model, ids = drawn(kind)
    with torch.no_grad(), ikattn.record(model, maps=("weights", "summed")) as recording:
        whole = model(ids).logits
    with torch.no_grad(), ikattn.record(model, maps=("weights",)) as steps:
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert_close(steps.joined()[0].weights[:, :, :23, :23], recording[0].weights, 1e-5)
    model.save_pretrained(tmp_path)
    load = ikattn.integrations.transformers.from_pretrained
    assert torch.equal(load(type(model), tmp_path, dtype=torch.float64).eval()(ids).logits, whole)
    model(ids, labels=ids).loss.backward()
    own = {name: x for name, x in model.named_parameters() if "forget" in name}
    assert len(own) == 4
    assert all(bool(x.grad.any()) for x in own.values())
    with pytest.raises(ValueError, match=r"has kernels with .*'forget': True"):
        ikattn.convert(model, num_frequencies=4, p=None)
    with pytest.raises(ValueError, match="has gates"):
        ikattn.calibrate(model, [ids])
    ikattn.revert(model)
    assert not [name for name, _ in model.named_parameters() if "forget" in name]


def test_a_checkpoint_without_gates_keeps_its_frequencies(tmp_path: Path) -> None:
    model, _ = drawn()
    plain, _ = drawn(forget=False)
    plain.save_pretrained(tmp_path)
    load = ikattn.integrations.transformers.from_pretrained
    loaded = load(type(model), tmp_path, config=model.config, dtype=torch.float64)
    found, kept = (x.model.layers[0].self_attn.spectral for x in (loaded, plain))
    assert torch.equal(found.w1, kept.w1)
    assert found.forget.bias.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_models_that_are_not_causal_have_no_gates() -> None:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 20}
    model = transformers.BartModel(transformers.BartConfig(**sizes, **heads))
    with pytest.raises(ValueError, match="forget must be False for BartAttention, which is not"):
        ikattn.convert(model, forget=True)
    assert not [name for name, _ in model.named_modules() if "spectral" in name]
