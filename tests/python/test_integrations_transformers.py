"""The attention implementation "ikattn_implicit" in tiny models with random weights."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import formula
import ikattn
from agreement import assert_close
from ikattn.integrations.transformers import (
    ImplicitKernel,
    feature_cache,
    from_pretrained,
    register,
    use_implicit_attention,
)
from transformers_models import BERT, FAMILIES, GROUPED, T5, build, inputs_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOLERANCE = 1e-11  # all of it in float64
M = 5
GENERATORS = {
    "gpt2": "LMHeadModel",
    "llama": "ForCausalLM",
    "mistral": "ForCausalLM",
    "t5": "ForConditionalGeneration",
    "bart": "ForConditionalGeneration",
}
families = pytest.mark.parametrize("family", FAMILIES)
generators = pytest.mark.parametrize("family", GENERATORS)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def convert(model: Any, **options: Any) -> Any:
    """The model with frequencies so large that kernels are far from flat."""
    use_implicit_attention(model, **{"num_frequencies": M, "seed": 1, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".spectral." in name:
                parameter.mul_(0.5)
    return model


def kernels(model: nn.Module) -> dict[str, ImplicitKernel]:
    return {name: m for name, m in model.named_modules() if isinstance(m, ImplicitKernel)}


def by_formula(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """The definition, with keys repeated and everything that is added to logits in one tensor."""
    d, T, S = query.size(3), query.size(2), key.size(2)
    if scaling is not None:
        query = query * scaling * d**0.5
    bias = torch.zeros(1, 1, T, S)
    if attention_mask is not None:
        assert attention_mask.dtype == torch.bool
        bias = bias.masked_fill(~attention_mask, -torch.inf)
    elif T > 1 and (module.is_causal if is_causal is None else is_causal):
        bias = bias.masked_fill(torch.ones(T, S).triu(1) > 0, -torch.inf)
    if position_bias is not None:
        bias = bias + position_bias
    w1, w2 = module.spectral.frequencies()
    heads = query.size(1)
    key, value = (x.repeat_interleave(heads // x.size(1), 1) for x in (key, value))
    output = formula.attention(
        query=query, key=key, value=value, w1=w1, w2=w2, p=module.spectral.p, attn_mask=bias
    )
    return output.transpose(1, 2), None


def call(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    found = model(**inputs)
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def trained(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The last hidden state where tokens are, and the gradients of all parameters."""
    model.zero_grad()
    output = call(model, inputs)["last_hidden_state"]
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    if mask is not None:
        output = output[mask.bool()]
    output.pow(2).sum().backward()
    grads = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    return output.detach(), grads


# --- Every family


@families
@pytest.mark.parametrize("padded", [True, False])
def test_outputs_and_gradients_are_those_of_the_formula(family: str, padded: bool) -> None:
    model, inputs = convert(build(family), p=3.0), inputs_of(family)
    if not padded:  # then some models pass no mask
        inputs = {name: x for name, x in inputs.items() if "attention_mask" not in name}
    output, grads = trained(model, inputs)
    transformers.AttentionInterface.register("by_formula", by_formula)
    masks = transformers.AttentionMaskInterface
    masks.register("by_formula", masks()["sdpa"])
    model.set_attn_implementation("by_formula")
    expected, expected_grads = trained(model, inputs)
    assert_close(output, expected, TOLERANCE)
    assert grads.keys() == expected_grads.keys()
    for name in expected_grads:
        scale = 1e-3 * max(x.abs().max().item() for x in expected_grads.values())
        assert_close(grads[name], expected_grads[name], 1e-8, name, scale)
    assert sum(".spectral." in name for name in grads) == 2 * len(kernels(model))
    assert all(grads[f"{name}.w1"].any() for name in kernels(model))


@families
def test_a_saved_model_loads_with_its_frequencies(family: str, tmp_path: Path) -> None:
    model = convert(build(family), p=None, stationary=True)
    inputs = inputs_of(family)
    model.save_pretrained(tmp_path)
    options = {"experts_implementation": "eager"} if family == "mixtral" else {}
    loaded, info = from_pretrained(type(model), tmp_path, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is type(model)
    assert loaded.config._attn_implementation == "ikattn_implicit"
    assert not loaded.training
    assert all(kernel.p is None and kernel.stationary for kernel in kernels(loaded).values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with torch.no_grad():
        expected, found = call(model, inputs), call(loaded, inputs)
    for name in expected:
        assert_close(found[name], expected[name], TOLERANCE, name)


@families
def test_each_layer_has_a_kernel_of_its_own_for_each_query_head(family: str) -> None:
    model = build(family)
    weights = dict(model.named_parameters())
    convert(model)
    after = dict(model.named_parameters())
    assert all(after[name] is weight for name, weight in weights.items())
    assert all(".spectral.w" in name for name in after.keys() - weights.keys())
    found = kernels(model)
    assert all(kernel.w1.dtype == torch.float64 for kernel in found.values())
    assert len({kernel.w1.sum().item() for kernel in found.values()}) == len(found)
    parameters = {*model.parameters()}
    use_implicit_attention(model, num_frequencies=M)  # a second time
    assert {*model.parameters()} == parameters
    with pytest.raises(ValueError, match=r"has kernels with .*: 5.* already, got .*: 7"):
        use_implicit_attention(model, num_frequencies=7)


# --- Masks


@pytest.mark.parametrize("masked", ["bool", "float"])
def test_masks_with_four_axes_hide_keys(masked: str) -> None:
    model = convert(build("llama"))
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    visible = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril() & (torch.arange(6) != 2)
    mask = visible
    if masked == "float":
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float64).min)
    with torch.no_grad():
        hidden = model(tokens, attention_mask=mask).last_hidden_state
        tokens[0, 2] = 17  # nobody sees it
        same = model(tokens, attention_mask=mask).last_hidden_state
        padded = model(tokens, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]])).last_hidden_state
    others = torch.arange(6) != 2
    assert torch.equal(hidden[:, others], same[:, others])
    assert not torch.equal(hidden[:, 2], same[:, 2])
    # keyed by their places, which the mask does not change
    positions = torch.arange(6)[None]
    with torch.no_grad():
        explicit = model(tokens, attention_mask=mask, position_ids=positions).last_hidden_state
        padded = model(
            tokens, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]), position_ids=positions
        ).last_hidden_state
    assert_close(explicit[:, others], padded[:, others], TOLERANCE)


def test_padding_does_not_change_what_tokens_get() -> None:
    model = convert(build("bert"))
    short = torch.tensor([[5, 6, 7]])
    long, mask = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[1, 1, 1, 0, 0]])
    with torch.no_grad():
        expected = model(short).last_hidden_state
        found = model(long, attention_mask=mask).last_hidden_state[:, :3]
    assert_close(found, expected, TOLERANCE)


def test_the_position_bias_of_t5_is_trained() -> None:
    model, inputs = convert(build("t5")), inputs_of("t5")
    _, grads = trained(model, inputs)
    assert grads["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].any()


# --- Decoding


def decoding(family: str) -> tuple[Any, dict[str, Tensor], str, Tensor]:
    """A model, what it is given in every step, the name of its tokens, and tokens."""
    model, inputs = convert(build(family, head=GENERATORS[family])), inputs_of(family)
    target = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    inputs.pop("decoder_attention_mask", None)
    if target == "input_ids":
        inputs.pop("attention_mask")
    return model, inputs, target, torch.tensor([[1, 4, 3, 5, 9], [1, 7, 9, 6, 8]])


@generators
def test_a_cache_changes_no_number(family: str) -> None:
    model, inputs, target, tokens = decoding(family)
    with torch.no_grad():
        full = model(**inputs | {target: tokens}).logits
        cache, steps = None, []
        for part in (tokens[:, :2], tokens[:, 2:3], tokens[:, 3:]):
            found = model(**inputs | {target: part}, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            steps.append(found.logits)
    assert_close(torch.cat(steps, 1), full, TOLERANCE)


@generators
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_takes_the_tokens_of_the_full_forward(family: str, cache: str) -> None:
    model = convert(build(family, head=GENERATORS[family]))
    prompt = torch.tensor([[5, 6, 7, 8], [0, 0, 13, 14]])  # padded on the left
    inputs = {"input_ids": prompt, "attention_mask": (prompt != 0).long()}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1}
    options |= {"cache_implementation": cache, "disable_compile": True}
    found = model.generate(**inputs, **options)
    again = model.generate(**inputs, **options | {"use_cache": False, "cache_implementation": None})
    assert found.size(1) >= 5
    assert torch.equal(found, again)


# --- Decoding with features kept


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which way each call of the attention function went, and for how many queries."""
    found: list[tuple[str, int]] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            query = args[1] if name == "kept" else args[0]
            found.append((name, query.size(2)))
            return function(*args, **kwargs)

        return call

    implicit = sys.modules["ikattn.integrations.transformers._implicit"]
    operator = noted("operator", implicit.implicit_kernel_attention)
    monkeypatch.setattr(implicit, "implicit_kernel_attention", operator)
    attend = noted("kept", ikattn.KeyFeatures.attend)
    monkeypatch.setattr(ikattn.KeyFeatures, "attend", attend)
    return found


def step_by_step(model: Any, inputs: dict[str, Tensor], tokens: Tensor, target: str) -> Tensor:
    """Logits of a prompt of two, one token, and the rest, through one feature cache."""
    cache, steps = feature_cache(model), []
    for part in (tokens[:, :2], tokens[:, 2:3], tokens[:, 3:]):
        steps.append(model(**inputs | {target: part}, past_key_values=cache).logits)
    return torch.cat(steps, 1)


@generators
def test_a_feature_cache_changes_no_number(family: str, calls: list[tuple[str, int]]) -> None:
    model, inputs, target, tokens = decoding(family)
    with torch.no_grad():
        full = model(**inputs | {target: tokens}).logits
        calls.clear()
        found = step_by_step(model, inputs, tokens, target)
    assert_close(found, full, TOLERANCE)
    ways = {way for way, queries in calls if queries == 1}
    assert ways == ({"operator"} if family == "mistral" else {"kept"})  # mistral's window slides


@generators
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_takes_the_same_tokens_with_features_kept(
    family: str, beams: int, calls: list[tuple[str, int]]
) -> None:
    model = convert(build(family, head=GENERATORS[family]))
    prompt = torch.tensor([[5, 6, 7, 8], [0, 0, 13, 14]])  # padded on the left
    inputs = {"input_ids": prompt, "attention_mask": (prompt != 0).long()}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": beams}
    expected = model.generate(**inputs, **options)
    calls.clear()
    found = model.generate(**inputs, **options, past_key_values=feature_cache(model))
    assert torch.equal(found, expected)
    if family != "mistral":
        assert ("kept", 1) in calls
        assert ("operator", 1) not in calls


def test_a_long_prompt_and_what_needs_more_take_the_operator(calls: list[tuple[str, int]]) -> None:
    model = convert(build("llama", head="ForCausalLM"))
    tokens = torch.randint(3, 30, (1, 20))
    with torch.no_grad():
        cache = feature_cache(model)
        expected = model(input_ids=tokens).logits
        calls.clear()
        parts = [model(input_ids=x, past_key_values=cache).logits for x in tokens.split(10, 1)]
    assert_close(torch.cat(parts, 1), expected, TOLERANCE)
    assert {way for way, _ in calls} == {"operator"}
    calls.clear()
    model(input_ids=tokens[:, :1], past_key_values=feature_cache(model)).logits.sum().backward()
    assert {way for way, _ in calls} == {"operator"}
    assert model.model.layers[0].self_attn.spectral.w1.grad.any()


def test_a_feature_cache_is_cropped_selected_repeated_and_reset() -> None:
    model = convert(build("llama", head="ForCausalLM"))
    tokens = torch.randint(3, 30, (2, 9))
    with torch.no_grad():
        cache = feature_cache(model)
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


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a_feature_cache_of_a_prompt_is_used_again(
    way: str, tmp_path: Path, calls: list[tuple[str, int]]
) -> None:
    model = convert(build("llama", head="ForCausalLM"))
    tokens = torch.randint(3, 30, (1, 9))
    with torch.no_grad():
        cache = feature_cache(model)
        for token in tokens[:, :6].split(1, 1):
            model(input_ids=token, past_key_values=cache)
        if way == "deepcopy":
            again = copy.deepcopy(cache)
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
        cache = feature_cache(model)
        found = [model(input_ids=x, past_key_values=cache).logits for x in tokens.split(1, 1)]
    (_, features), *_ = cache.layers[0].kept.values()
    assert features.features.dtype == torch.float32
    assert_close(torch.cat(found, 1), expected, 0.05)


def test_layers_that_share_keys_have_their_own_features(calls: list[tuple[str, int]]) -> None:
    """And so has a kernel whose frequencies have changed."""
    torch.manual_seed(0)
    cache = feature_cache(convert(build("llama", head="ForCausalLM")))
    modules = [convert(build("llama")).layers[0].self_attn for _ in range(2)]
    modules[1].spectral.w1.data.mul_(-0.7)
    key, value = cache.update(*torch.randn(2, 1, 2, 9, 4), 0)
    query = torch.randn(1, 4, 1, 4)
    implicit = sys.modules["ikattn.integrations.transformers._implicit"]
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
        found = model.generate(prompt, **options, past_key_values=feature_cache(model))
        again = copy.deepcopy(feature_cache(model))
        assert torch.equal(model.generate(prompt, **options, past_key_values=again), expected)
    assert torch.equal(found, expected)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(prompt, **options, past_key_values=feature_cache(model))
    assert ("operator", 1) not in calls


def test_a_copied_cache_of_an_encoder_decoder_keeps_features(calls: list[tuple[str, int]]) -> None:
    model = convert(build("t5", head="ForConditionalGeneration"))
    inputs, token = {"input_ids": torch.tensor([[5, 6, 7, 8]])}, torch.tensor([[1]])
    with torch.no_grad():
        cache = feature_cache(model)
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
    for cache in (feature_cache(model), transformers.DynamicCache(config=model.config)):
        with torch.no_grad():
            for token in tokens.split(1, 1):
                model(input_ids=token, past_key_values=cache)
            cache.batch_select_indices(indices)
            found.append(model(input_ids=tokens[:2, :1], past_key_values=cache).logits)
    assert_close(found[0], found[1], TOLERANCE)


def test_what_a_feature_cache_is_not_for_takes_the_operator(calls: list[tuple[str, int]]) -> None:
    model = convert(build("gpt2", head="LMHeadModel"))
    attention = model.transformer.h[0].attn
    implicit = sys.modules["ikattn.integrations.transformers._implicit"]
    cache = feature_cache(model)
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
    attention.spectral = ikattn.spectral.Direct(4, 4, M).double()
    attention.spectral.p = 2.0
    assert ways(key=cache.layers[0].keys[..., :9, :], is_causal=False) == {"operator"}


def test_a_compiled_model_takes_the_operator() -> None:
    model = convert(build("gpt2", head="LMHeadModel"))
    tokens = torch.randint(3, 30, (1, 4))
    cache = feature_cache(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = [compiled(input_ids=x, past_key_values=cache).logits for x in tokens.split(2, 1)]
        assert_close(torch.cat(found, 1), model(input_ids=tokens).logits, TOLERANCE)


def test_a_feature_cache_is_for_transformers_models() -> None:
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Linear"):
        feature_cache(torch.nn.Linear(2, 2))


def test_grouped_heads_are_repeated_heads() -> None:
    grouped = convert(build("llama"))
    config = transformers.LlamaConfig(**GROUPED | {"num_key_value_heads": 4})
    repeated = convert(transformers.LlamaModel(config).double().eval())
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:  # [G * d, D]
            state[name] = state[name].unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
    repeated.load_state_dict(state)
    inputs = inputs_of("llama")
    with torch.no_grad():
        expected, found = (call(m, inputs)["last_hidden_state"] for m in (repeated, grouped))
    mask = inputs["attention_mask"].bool()
    assert_close(found[mask], expected[mask], TOLERANCE)


# --- Training


def test_dropout_is_drawn_in_training_and_only_there() -> None:
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5}
    model, inputs = convert(build("bert", **options)), inputs_of("bert")
    with torch.no_grad():
        quiet = [call(model, inputs)["last_hidden_state"] for _ in range(2)]
        model.train()
        torch.manual_seed(0)
        one, other = (call(model, inputs)["last_hidden_state"] for _ in range(2))
        torch.manual_seed(0)
        again = call(model, inputs)["last_hidden_state"]
    assert torch.equal(*quiet)
    assert not torch.equal(one, quiet[0])
    assert not torch.equal(one, other)
    assert torch.equal(one, again)


def test_the_trainer_trains_frequencies_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    torch.set_default_dtype(torch.float32)
    config = transformers.BertConfig(**BERT, num_labels=2)
    model = use_implicit_attention(transformers.BertForSequenceClassification(config), seed=0)
    before = {name: kernel.w1.detach().clone() for name, kernel in kernels(model).items()}
    examples = [{"input_ids": torch.arange(5) + i, "labels": i % 2} for i in range(8)]
    options = {"output_dir": str(tmp_path), "per_device_train_batch_size": 4, "report_to": "none"}
    options |= {"max_steps": 4, "save_steps": 2, "use_cpu": True, "learning_rate": 0.01}
    options |= {"disable_tqdm": True, "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(**options)
    transformers.Trainer(model, arguments, train_dataset=examples).train()
    assert all((kernel.w1 != before[name]).any() for name, kernel in kernels(model).items())

    fresh = use_implicit_attention(transformers.BertForSequenceClassification(config), seed=1)
    trainer = transformers.Trainer(fresh, arguments, train_dataset=examples)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = model.state_dict()
    assert all(torch.equal(w, expected[name]) for name, w in fresh.state_dict().items())
    loaded = from_pretrained(
        transformers.AutoModelForSequenceClassification, tmp_path / "checkpoint-4"
    )
    assert all(torch.equal(w, expected[name]) for name, w in loaded.state_dict().items())


def test_checkpointed_activations_give_the_same_gradients() -> None:
    options = {"attention_probs_dropout_prob": 0.25, "hidden_dropout_prob": 0.0}
    model, inputs = convert(build("bert", **options)).train(), inputs_of("bert")
    torch.manual_seed(0)
    _, expected = trained(model, inputs)
    model.activation_checkpointing_enable()
    torch.manual_seed(0)
    _, found = trained(model, inputs)
    for name in expected:
        assert_close(found[name], expected[name], TOLERANCE, name, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_half_precision_stays_close(family: str, dtype: torch.dtype) -> None:
    model, inputs = convert(build(family)), inputs_of(family)
    with torch.no_grad():
        expected = call(model, inputs)["last_hidden_state"]
        found = call(model.to(dtype), inputs)["last_hidden_state"]
    assert all(kernel.w1.dtype == dtype for kernel in kernels(model).values())
    assert found.dtype == dtype
    mask = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
    assert_close(found[mask].double(), expected[mask], 0.1)


def test_autocast_runs() -> None:
    torch.set_default_dtype(torch.float32)
    model, inputs = convert(build("bert").float()), inputs_of("bert")
    with torch.no_grad():
        expected = call(model, inputs)["last_hidden_state"]
    with torch.autocast("cpu", torch.bfloat16):
        found = call(model, inputs)["last_hidden_state"]
    found.sum().backward()
    assert_close(found.double(), expected.double(), 0.1)
    assert all(kernel.w1.grad.isfinite().all() for kernel in kernels(model).values())


# --- What else a user does


def test_weights_are_returned_on_demand() -> None:
    model, inputs = convert(build("bert")), inputs_of("bert")
    with torch.no_grad(), ikattn.record(model, maps=("weights",)) as recording:
        found = model(**inputs, output_attentions=True).attentions
    names = list(recording.names)
    assert len(found) == len(names) == 2
    valid = inputs["attention_mask"].bool()
    for weights, name in zip(found, names, strict=True):
        assert_close(weights.sum(-1), torch.ones(2, 4, 6), TOLERANCE)
        rows = valid[:, None, :, None]
        assert_close(recording[name].weights, weights * rows, TOLERANCE)


@families
def test_recorded_weights_are_those_of_the_formula(family: str) -> None:
    model, inputs = convert(build(family)), inputs_of(family)
    with torch.no_grad(), ikattn.record(model, maps=("weights", "similarity")) as recording:
        expected = call(model, inputs)["last_hidden_state"]
    with torch.no_grad():
        assert torch.equal(call(model, inputs)["last_hidden_state"], expected)
    outputs: list[Tensor] = []

    def note(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        output = by_formula(module, *arguments, **options)[0]
        d = arguments[2].size(-1)
        identity = torch.eye(arguments[1].size(2)).expand(*arguments[1].shape[:2], -1, -1)
        weights, _ = by_formula(module, *arguments[:2], identity, *arguments[3:], **options)
        outputs.append(weights.transpose(1, 2))
        assert output.size(-1) == d
        return output, None

    transformers.AttentionInterface.register("noting", note)
    masks = transformers.AttentionMaskInterface
    masks.register("noting", masks()["sdpa"])
    model.set_attn_implementation("noting")
    with torch.no_grad():
        call(model, inputs)
    names = [name for name in recording.batches[0] if "head" not in name]
    assert len(names) == len(outputs)
    for name, weights in zip(names, outputs, strict=True):
        maps = recording.batches[0][name]
        for padding, axis in ((maps.query_padding, 3), (maps.key_padding, 2)):
            if padding is not None:
                weights = weights.masked_fill(padding[:, None].unsqueeze(axis), 0.0)
        assert_close(maps.weights, weights, TOLERANCE, name)


def test_softmax_is_one_call_away() -> None:
    model, inputs = build("gpt2"), inputs_of("gpt2")
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = call(model, inputs)["last_hidden_state"]
        changed = call(convert(model), inputs)["last_hidden_state"]
        model.set_attn_implementation("sdpa")
        back = call(model, inputs)["last_hidden_state"]
    assert not torch.allclose(changed[mask], expected[mask])
    assert torch.equal(back[mask], expected[mask])


def test_a_model_of_two_models_is_saved_in_pieces_and_loads(tmp_path: Path) -> None:
    encoder = transformers.BertModel(transformers.BertConfig(**BERT))
    options = {"is_decoder": True, "add_cross_attention": True}
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**BERT | options))
    model = convert(transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = from_pretrained(transformers.AutoModelForSeq2SeqLM, tmp_path, dtype=torch.float64)
    assert len(kernels(loaded)) == 6  # two layers each, and two of cross-attention
    tokens = torch.tensor([[5, 6, 7]])
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens}
    assert_close(loaded(**inputs).logits, model(**inputs).logits, TOLERANCE)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_models_compile_as_one_graph_and_export(family: str) -> None:
    model, inputs = convert(build(family)), inputs_of(family)
    model.config.use_cache = False
    expected, grads = trained(model, inputs)
    found, found_grads = trained(
        torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True), inputs
    )
    assert_close(found, expected, TOLERANCE)
    for name in grads:
        assert_close(found_grads[f"_orig_mod.{name}"], grads[name], 1e-8, name, scale=1e-3)
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, strict=False).module()
        exported, eager = call(program, inputs), call(model, inputs)
    assert_close(exported["last_hidden_state"], eager["last_hidden_state"], TOLERANCE)


def test_a_stock_checkpoint_is_told_apart(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="saved without implicit attention"):
        from_pretrained(transformers.AutoModel, tmp_path)


def test_layers_that_a_checkpoint_lacks_get_new_frequencies(tmp_path: Path) -> None:
    convert(build("bert", num_hidden_layers=1)).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, num_hidden_layers=2)
    loaded = from_pretrained(transformers.BertForMaskedLM, tmp_path, config=config)
    bound = (4 * M) ** -0.5
    first, second = (kernel.w1.abs().max() for kernel in kernels(loaded).values())
    assert first < 0.5 * bound
    assert 0.9 * bound < second < bound


def test_a_checkpoint_for_another_head_loads(tmp_path: Path) -> None:
    model = convert(build("bert"))
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)
    assert type(loaded) is transformers.BertForMaskedLM
    for name, tensor in model.state_dict().items():
        if "pooler" not in name:
            assert torch.equal(loaded.bert.state_dict()[name], tensor)


# --- Errors


def test_a_model_without_frequencies_is_an_error() -> None:
    register()
    model = build("bert")
    model.set_attn_implementation("ikattn_implicit")
    with pytest.raises(RuntimeError, match=r"call .*use_implicit_attention"):
        model(**inputs_of("bert"))


def test_models_that_cannot_be_changed_say_what_was_found() -> None:
    config = transformers.DebertaV2Config(**BERT)
    with pytest.raises(ValueError, match=r"AttentionInterface.*DisentangledSelfAttention"):
        use_implicit_attention(transformers.DebertaV2Model(config))
    with pytest.raises(TypeError, match=r"PreTrainedModel, got Linear.*ikattn\.convert"):
        use_implicit_attention(nn.Linear(2, 2))


def test_unknown_sizes_are_an_error_that_names_the_way_out() -> None:
    model = build("llama")
    attention = model.layers[1].self_attn
    attention.size_of_heads, attention.head_dim = attention.head_dim, None
    with pytest.raises(ValueError, match=r"LlamaAttention, got .*size_of_heads.*sizes=lambda"):
        use_implicit_attention(model)
    assert not kernels(model)
    assert model.config._attn_implementation == "sdpa"
    use_implicit_attention(model, sizes=lambda module: (4, 4))
    assert len(kernels(model)) == 2


@pytest.mark.parametrize("options", [{"p": 0.5}, {"num_frequencies": 0}], ids=str)
def test_bad_options_change_nothing(options: dict[str, Any]) -> None:
    model = build("bert")
    with pytest.raises(ValueError, match="must be"):
        use_implicit_attention(model, **options)
    assert not kernels(model)


def test_capped_logits_are_refused_by_name() -> None:
    config = transformers.Gemma2Config(**GROUPED, head_dim=4)
    model = use_implicit_attention(transformers.Gemma2Model(config))
    with pytest.raises(NotImplementedError, match="Gemma2Attention passes softcap"):
        model(torch.tensor([[1, 2]]))


def test_scaled_models_give_the_kernel_what_unscaled_ones_would() -> None:
    """T5's scaling is 1: the factor 1 / sqrt(d) is in its query weights."""
    config = transformers.T5Config(**T5, tie_word_embeddings=False)
    model = convert(transformers.T5Model(config).double().eval())
    attention = model.encoder.block[0].layer[0].SelfAttention
    x = torch.randn(1, 4, 16)
    w1, w2 = attention.spectral.frequencies()
    query, key, value = (
        part(x).unflatten(-1, (4, 6)).transpose(1, 2)
        for part in (attention.q, attention.k, attention.v)
    )
    bias = attention.compute_bias(4, 4)
    expected = ikattn.reference.implicit_kernel_attention(
        query * 6**0.5, key, value, w1, w2, attn_mask=bias
    )
    found = attention(x)[0]
    assert_close(found, attention.o(expected.transpose(1, 2).flatten(2)), TOLERANCE)
