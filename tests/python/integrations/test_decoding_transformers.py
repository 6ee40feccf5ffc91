"""Decoding of tiny transformers models: caches, and the one that keeps the features of keys."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close
from ikattn.integrations.transformers import decoding_cache
from transformers_models import FREQUENCIES, GENERATORS, build, convert, inputs_of, keyword_of_cache
from transformers_models import IMPLICIT_TOLERANCE as TOLERANCE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

generators = pytest.mark.parametrize("family", GENERATORS)

pytestmark = pytest.mark.usefixtures("float64_by_default")


def decoding(family: str) -> tuple[Any, dict[str, Tensor], str, Tensor]:
    """A model, what it is given in every step, the name of its tokens, and tokens."""
    model, inputs = convert(build(family, head=GENERATORS[family])), inputs_of(family)
    target = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    inputs.pop("decoder_attention_mask", None)
    if target == "input_ids":
        inputs.pop("attention_mask")
    return model, inputs, target, torch.tensor([[1, 4, 3, 5, 9], [1, 7, 9, 6, 8]])


# --- Any cache, and features kept


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Notes the way of each call of the attention function, and its number of queries."""
    found: list[tuple[str, int]] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            query = args[1] if name == "kept" else args[0]
            found.append((name, query.size(2)))
            return function(*args, **kwargs)

        return call

    implicit = sys.modules["ikattn.integrations.transformers.attention"]
    operator = noted("operator", ikattn.implicit_kernel_attention)
    monkeypatch.setattr(implicit, "attention_function", lambda: operator)
    attend = noted("kept", ikattn.KeyFeatures.attend)
    monkeypatch.setattr(ikattn.KeyFeatures, "attend", attend)
    return found


@generators
@pytest.mark.parametrize("kind", ["dynamic", "features"])
def test_a_cache_changes_no_number(family: str, kind: str, calls: list[tuple[str, int]]) -> None:
    model, inputs, target, tokens = decoding(family)
    cache, steps = decoding_cache(model, "features") if kind == "features" else None, []
    with torch.no_grad():
        full = model(**inputs | {target: tokens}).logits
        calls.clear()
        for part in (tokens[:, :2], tokens[:, 2:3], tokens[:, 3:]):
            found = model(**inputs | {target: part}, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            steps.append(found.logits)
    assert_close(torch.cat(steps, 1), full, TOLERANCE)
    ways = {way for way, queries in calls if queries == 1}
    is_kept = kind == "features" and family != "mistral"  # whose window slides
    assert ways == ({"kept"} if is_kept else {"operator"})


@generators
@pytest.mark.parametrize(
    ("cache", "beams"), [("dynamic", 1), ("static", 1), ("features", 1), ("features", 3)]
)
def test_generate_takes_the_tokens_of_the_full_forward(family, cache, beams, calls):
    model = convert(build(family, head=GENERATORS[family]))
    prompt = torch.tensor([[5, 6, 7, 8], [0, 0, 13, 14]])  # padded on the left
    inputs = {"input_ids": prompt, "attention_mask": (prompt != 0).long()}
    inputs |= {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": beams}
    expected = model.generate(**inputs, use_cache=beams > 1)
    options: dict[str, Any] = {"cache_implementation": cache, "disable_compile": True}
    if cache == "features":
        options = {"past_key_values": decoding_cache(model, "features")}
    calls.clear()
    found = model.generate(**inputs, **options)
    assert found.size(1) >= 5
    assert torch.equal(found, expected)
    if family != "mistral" and cache == "features":
        assert ("kept", 1) in calls
        assert ("operator", 1) not in calls


def test_a_long_prompt_and_what_needs_more_take_the_operator(calls: list[tuple[str, int]]) -> None:
    model = convert(build("llama", head="ForCausalLM"))
    tokens = torch.randint(3, 30, (1, 20))
    with torch.no_grad():
        cache = decoding_cache(model, "features")
        expected = model(input_ids=tokens).logits
        calls.clear()
        parts = [model(input_ids=x, past_key_values=cache).logits for x in tokens.split(10, 1)]
    assert_close(torch.cat(parts, 1), expected, TOLERANCE)
    assert {way for way, _ in calls} == {"operator"}
    calls.clear()
    model(
        input_ids=tokens[:, :1], past_key_values=decoding_cache(model, "features")
    ).logits.sum().backward()
    assert {way for way, _ in calls} == {"operator"}
    assert model.model.layers[0].self_attn.spectral.w1.grad.any()


def test_a_cache_of_features_is_cropped_selected_repeated_and_reset() -> None:
    model = convert(build("llama", head="ForCausalLM"))
    tokens = torch.randint(3, 30, (2, 9))
    with torch.no_grad():
        cache = decoding_cache(model, "features")
        for token in tokens.split(1, 1):
            model(input_ids=token, past_key_values=cache)
        cache.crop(-3)
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(3)
        again = torch.tensor([[4], [5], [6]])
        found = model(input_ids=again, past_key_values=cache).logits
        whole = torch.cat([tokens[1:, :6].expand(3, 6), again], 1)
        assert_close(found[:, -1], model(input_ids=whole).logits[:, -1], TOLERANCE)
        cache.reset()
        found = model(input_ids=tokens[:, :2], past_key_values=cache).logits
        assert_close(found, model(input_ids=tokens[:, :2]).logits, TOLERANCE)


@pytest.mark.parametrize("way", ["copy", "deepcopy", "save"])
def test_a_cache_of_features_of_a_prompt_is_used_again(way, tmp_path, calls):
    model = convert(build("llama", head="ForCausalLM"))
    tokens = torch.randint(3, 30, (1, 9))
    with torch.no_grad():
        cache = decoding_cache(model, "features")
        for token in tokens[:, :6].split(1, 1):
            model(input_ids=token, past_key_values=cache)
        if way != "save":
            again = getattr(copy, way)(cache)
        else:
            torch.save(cache, tmp_path / "cache.pt")
            again = torch.load(tmp_path / "cache.pt", weights_only=False)
        calls.clear()
        for used in (cache, again):  # neither disturbs the other
            found = model(input_ids=tokens[:, 6:], past_key_values=used).logits
            assert set(calls) == {("kept", 3)}
            assert_close(found, model(input_ids=tokens).logits[:, 6:], TOLERANCE)
            calls.clear()


def test_features_are_kept_in_float32_for_a_model_in_bfloat16() -> None:
    model = convert(build("llama", head="ForCausalLM")).bfloat16()
    tokens = torch.randint(3, 30, (1, 9))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        cache = decoding_cache(model, "features")
        found = [model(input_ids=x, past_key_values=cache).logits for x in tokens.split(1, 1)]
    (_, features), *_ = cache.layers[0].kept.values()
    assert features.features.dtype == torch.float32
    assert_close(torch.cat(found, 1), expected, 0.05)


def test_layers_that_share_keys_have_their_own_features(calls: list[tuple[str, int]]) -> None:
    """A kernel whose frequencies have changed is refused, too."""
    torch.manual_seed(0)
    cache = decoding_cache(convert(build("llama", head="ForCausalLM")), "features")
    modules = [convert(build("llama")).layers[0].self_attn for _ in range(2)]
    modules[1].spectral.w1.data.mul_(-0.7)
    key, value = cache.update(*torch.randn(2, 1, 2, 9, 4), 0)
    query = torch.randn(1, 4, 1, 4)
    implicit = sys.modules["ikattn.integrations.transformers.attention"]
    with torch.no_grad():
        for module in (*modules, *modules):
            module.spectral.w1.mul_(1.5)
            found = implicit._implicit_attention(module, query, key, value, None)[0]
            plain = implicit._implicit_attention(module, query, key.clone(), value, None)[0]
            assert_close(found, plain, TOLERANCE)
    assert [way for way, _ in calls] == ["kept", "operator"] * 4
    assert torch.equal(cache.layers[0].keys, key)


def test_beams_in_inference_mode_and_under_autocast(calls: list[tuple[str, int]]) -> None:
    model = convert(build("bart", head="ForConditionalGeneration")).float()
    prompt = torch.tensor([[5, 6, 7, 8], [4, 3, 13, 14]])
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 3}
    expected = model.generate(prompt, **options)
    calls.clear()
    with torch.inference_mode():
        found = model.generate(prompt, **options, past_key_values=decoding_cache(model, "features"))
        again = copy.deepcopy(decoding_cache(model, "features"))
        assert torch.equal(model.generate(prompt, **options, past_key_values=again), expected)
    assert torch.equal(found, expected)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(prompt, **options, past_key_values=decoding_cache(model, "features"))
    assert ("operator", 1) not in calls


def test_a_copied_cache_of_an_encoder_decoder_keeps_features(calls: list[tuple[str, int]]) -> None:
    model = convert(build("t5", head="ForConditionalGeneration"))
    inputs, token = {"input_ids": torch.tensor([[5, 6, 7, 8]])}, torch.tensor([[1]])
    with torch.no_grad():
        cache = decoding_cache(model, "features")
        model(**inputs, decoder_input_ids=token, past_key_values=cache)
        copied = copy.deepcopy(cache)
        expected = model(**inputs, decoder_input_ids=token, past_key_values=cache).logits
        calls.clear()
        found = model(**inputs, decoder_input_ids=token, past_key_values=copied).logits
    assert_close(found, expected, TOLERANCE)
    assert ("operator", 1) not in calls


@pytest.mark.parametrize("indices", [torch.tensor([True, False, True]), [0, 2], slice(1, 3)])
def test_batch_items_are_selected_as_from_any_cache(indices: Any) -> None:
    model = convert(build("gpt2", head="LMHeadModel"))
    tokens = torch.randint(3, 30, (3, 5))
    found = []
    for cache in (
        decoding_cache(model, "features"),
        transformers.DynamicCache(config=model.config),
    ):
        with torch.no_grad():
            for token in tokens.split(1, 1):
                model(input_ids=token, past_key_values=cache)
            cache.batch_select_indices(indices)
            found.append(model(input_ids=tokens[:2, :1], past_key_values=cache).logits)
    assert_close(found[0], found[1], TOLERANCE)


def test_what_a_cache_of_features_is_not_for_takes_the_operator(calls):
    model = convert(build("gpt2", head="LMHeadModel"))
    attention = model.transformer.h[0].attn
    implicit = sys.modules["ikattn.integrations.transformers.attention"]
    cache = decoding_cache(model, "features")
    key, value = cache.update(*torch.randn(2, 1, 4, 9, 4), 0)
    query = torch.randn(1, 4, 3, 4)

    def ways(key: Tensor = key, **options: Any) -> set[str]:
        calls.clear()
        with torch.no_grad():
            implicit._implicit_attention(attention, query, key, value, None, **options)
        return {way for way, _ in calls}

    assert ways(is_causal=False) == {"kept"}
    assert ways(is_causal=True) == {"operator"}  # the first queries' keys, not the last ones'
    assert ways(is_causal=False, dropout=0.5) == {"operator"}
    assert ways(is_causal=False, output_attentions=True) == {"operator"}
    old = key
    cache.update(*torch.randn(2, 1, 4, 1, 4), 0)
    assert ways(key=old, is_causal=False) == {"operator"}  # the cache has gone on
    attention.spectral = ikattn.spectral.Direct(4, 4, FREQUENCIES).double()
    attention.spectral.p = 2.0
    assert ways(key=cache.layers[0].keys[..., :9, :], is_causal=False) == {"operator"}


def test_a_compiled_model_takes_the_operator() -> None:
    model = convert(build("gpt2", head="LMHeadModel"))
    tokens = torch.randint(3, 30, (1, 4))
    cache = decoding_cache(model, "features")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = [compiled(input_ids=x, past_key_values=cache).logits for x in tokens.split(2, 1)]
        assert_close(torch.cat(found, 1), model(input_ids=tokens).logits, TOLERANCE)


@pytest.mark.parametrize("kind", ["features", "state", None])
def test_generate_takes_caches_without_a_warning(kind: Any) -> None:
    model = convert(build("gpt2", head="LMHeadModel"))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    prompt = torch.tensor([[5, 6, 7]])

    def make(model: Any) -> Any:
        return kind and decoding_cache(model, kind)

    expected = model.generate(prompt, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.generate(prompt, **options, **{keyword_of_cache(): make(model)})
        if keyword_of_cache() == "cache":  # of the old name transformers warns by itself
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        again = model.generate(prompt, **options, past_key_values=make(model))
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)


def test_a_cache_tells_its_size() -> None:
    model = convert(build("bart", head="ForConditionalGeneration"))
    cache = decoding_cache(model, "features")
    assert cache.nbytes == 0
    with torch.no_grad():
        token = torch.tensor([[1]])
        model(input_ids=torch.tensor([[5, 6]]), decoder_input_ids=token, past_key_values=cache)
    parts = [cache.self_attention_cache, cache.cross_attention_cache]
    layers = [layer for part in parts for layer in part.layers]
    held = [x for layer in layers for x in (layer.keys, layer.values)]
    held += [features for layer in layers for _, features in layer.kept.values()]
    assert len(held) == 6
    assert cache.nbytes == sum(x.nbytes for x in held)
    windows = decoding_cache(build("mistral", head="ForCausalLM"), "features")
    windows.update(*torch.zeros(2, 1, 2, 3, 4), 0)
    assert windows.nbytes // (2 * 2 * 2 * 4 * 8) == 1  # two tokens before, and counters


def test_a_cache_is_for_transformers_models_and_of_a_known_kind() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of \('auto', .*, got 'sums'"):
        decoding_cache(build("llama"), "sums")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Linear"):
        decoding_cache(torch.nn.Linear(2, 2), "features")


def test_a_model_made_in_inference_mode_decodes(calls: list[tuple[str, int]]) -> None:
    with torch.inference_mode():
        model = convert(build("gpt2", head="LMHeadModel"))
        tokens = torch.randint(3, 30, (1, 4))
        cache = decoding_cache(model, "features")
        found = [model(input_ids=x, past_key_values=cache).logits for x in tokens.split(1, 1)]
        assert {way for way, _ in calls} == {"kept"}
        assert_close(torch.cat(found, 1), model(input_ids=tokens).logits, TOLERANCE)
