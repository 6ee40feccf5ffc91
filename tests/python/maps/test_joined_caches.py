"""Steps of ``generate`` as one call, with caches that are short, have room, or are cropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ikattn
from ikattn.maps.sequences import sequences
from tiny_texts import tiny_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3},
}
KINDS = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "window": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 4}),
    "mixed": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 4, "layer_types": KINDS}),
}
MAPS = ("value_norms", "summed", "mixing_ratio")
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"cache_implementation": "static"}),
        ("llama", {"prompt_lookup_num_tokens": 3}),
        ("window", {}),
        ("mixed", {}),
        ("mixed", {"cache_implementation": "static"}),
    ],
)
@torch.no_grad()
def test_joined_steps_are_the_maps_of_the_whole_text(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model_name, config_name, more = MODELS[kind]
    config = getattr(transformers, config_name)(**SIZES, **more)
    model = getattr(transformers, model_name)(config).eval()
    model.generation_config.eos_token_id = None
    with ikattn.record(model, MAPS) as steps:
        made = model.generate(PROMPT, max_new_tokens=8, do_sample=False, **options)
    whole = made[:, :-1]
    with ikattn.record(model, MAPS) as at_once:
        model(whole, attention_mask=torch.ones_like(whole))
    (joined,) = steps.joined().batches
    n = whole.size(1)  # the last call may have guessed more tokens
    for name, maps in joined.items():
        assert maps.summed.size(1) == maps.summed.size(2)
        for found, expected in (
            (maps.summed, at_once[name].summed),
            (maps.value_norms, at_once[name].value_norms),
            (maps.mixing_ratio["summed"], at_once[name].mixing_ratio["summed"]),
        ):
            own = found[..., :n] if found is not maps.summed else found[:, :n, :n]
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    if "prompt_lookup_num_tokens" in options:
        return  # calls of tokens that were taken back
    own = tiny_tokenizer().convert_ids_to_tokens(whole[0].tolist())
    for one in sequences(steps, tiny_tokenizer()):
        for name, maps in one.layers.items():
            rows, columns = one.labels(steps.layers[name])
            L, S = maps.summed.shape
            end = (one.begins or 0) + L
            assert (rows, columns) == (own[end - L : end], own[end - S : end])


@torch.no_grad()
def test_columns_of_a_static_cache_are_the_tokens_alone() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with ikattn.record(model, "summed") as recording:
        cache = transformers.StaticCache(config=model.config, max_cache_len=7)
        model(PROMPT[:, :4], past_key_values=cache)
    (one,) = sequences(recording, tiny_tokenizer())
    rows, columns = one.labels(recording.layers[recording.names[0]])
    assert rows == columns == tiny_tokenizer().convert_ids_to_tokens(PROMPT[0, :4].tolist())


def test_a_static_cache_keeps_what_padding_hides() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    ids, options = torch.tensor([[0, 0, 5], [7, 8, 5]]), {"cache_implementation": "static"}
    with ikattn.record(model, "summed") as steps:
        model.generate(ids, attention_mask=ids.sign(), max_new_tokens=1, **options)
    rows = [x.labels(steps.layers[steps.names[0]])[0] for x in sequences(steps, tiny_tokenizer())]
    assert [len(row) for row in rows] == [1, 3]
