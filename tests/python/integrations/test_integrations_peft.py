"""PEFT's LoRA on converted models: projections by LoRA, frequencies in full."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close
from drawing import moved
from ikattn.integrations.peft import merge_and_unload, with_trainable_frequencies

peft = pytest.importorskip("peft", reason="peft is not installed")

N, L, E, H, M = 2, 5, 16, 4, 6
SCALING = 2.0
TOLERANCE = 1e-12  # all of it in float64

pytestmark = pytest.mark.usefixtures("float64_by_default")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(E, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def converted() -> nn.Module:
    return ikattn.convert(Classifier(), num_frequencies=M, seed=0)


def with_lora(model: nn.Module, target: str, **options: Any) -> Any:
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=[target], init_lora_weights=False, **options
    )
    return peft.get_peft_model(model, config)


def delta(state: dict[str, Tensor], name: str) -> Tensor:
    """scaling B A of an adapted module."""
    prefix = f"base_model.model.{name}"
    a, b = (state[f"{prefix}.lora_{side}.default.weight"] for side in "AB")
    return SCALING * b @ a


def by_reference(
    module: ikattn.MultiheadAttention, x: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """Self-attention of x [N, L, E] with these weights, in torch's own functions."""
    q, k, v = (
        part.unflatten(-1, (H, -1)).transpose(1, 2)
        for part in nn.functional.linear(x, w_in, module.in_proj_bias).chunk(3, -1)
    )
    w1, w2 = module.spectral.frequencies()
    heads = ikattn.reference.implicit_kernel_attention(q, k, v, w1, w2, p=module.p)
    return nn.functional.linear(heads.transpose(1, 2).flatten(2), w_out, module.out_proj.bias)


def attention_of(model: Any) -> nn.Module:
    return model.base_model.model.encoder.layers[0].self_attn


def test_lora_reaches_the_in_projection_and_the_out_projection() -> None:
    base = converted()
    plain = copy.deepcopy(base.encoder.layers[0].self_attn)
    model = with_lora(base, "self_attn")
    x = torch.randn(N, L, E)
    found = attention_of(model)(x, x, x)[0]

    state = model.state_dict()
    name = "encoder.layers.0.self_attn"
    w_in = plain.in_proj_weight + delta(state, name)
    of_out_proj = delta(state, f"{name}.base_layer.out_proj")
    # PEFT 0.21 adds the out-projection's delta twice, to nn.MultiheadAttention just as well
    errors = [
        (found - by_reference(plain, x, w_in, plain.out_proj.weight + times * of_out_proj)).abs()
        for times in (1, 2)
    ]
    assert min(error.max().item() for error in errors) < TOLERANCE


def test_lora_does_to_the_dot_kernel_what_it_does_to_stock_attention() -> None:
    stock = Classifier()
    ours = ikattn.convert(copy.deepcopy(stock), "dot")
    x = torch.randn(N, L, E)
    torch.manual_seed(1)
    expected = with_lora(stock, "self_attn")(x)
    torch.manual_seed(1)
    assert_close(with_lora(ours, "self_attn")(x), expected, TOLERANCE)


def test_the_out_projection_can_be_adapted_alone() -> None:
    base = converted()
    plain = copy.deepcopy(base.encoder.layers[0].self_attn)
    model = with_lora(base, "out_proj")
    x = torch.randn(N, L, E)
    state = model.state_dict()
    w_out = plain.out_proj.weight + delta(state, "encoder.layers.0.self_attn.out_proj")
    expected = by_reference(plain, x, plain.in_proj_weight, w_out)
    for training in (True, False):
        assert_close(attention_of(model.train(training))(x, x, x)[0], expected, TOLERANCE)


@pytest.mark.parametrize("target", ["self_attn", "out_proj"])
def test_evaluation_and_merging_change_no_number(target: str) -> None:
    model = with_lora(converted(), target)
    x = torch.randn(N, L, E)
    expected = model.train()(x)
    with torch.no_grad():
        assert_close(model.eval()(x), expected, TOLERANCE)
        merged = model.merge_and_unload()
        assert_close(merged(x), expected, TOLERANCE)
    assert [type(layer.self_attn) for layer in merged.encoder.layers] == [
        ikattn.MultiheadAttention
    ] * 2


def test_only_adapters_and_frequencies_are_trained() -> None:
    model = with_lora(
        with_trainable_frequencies(converted()), "self_attn", modules_to_save=["head"]
    )
    before = {name: w.detach().clone() for name, w in model.named_parameters()}
    parameters = [w for w in model.parameters() if w.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=0.01)
    x, y = torch.randn(16, L, E), torch.randint(2, (16, L))
    losses = []
    for _ in range(10):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    # PEFT adds its delta to the weights and takes it off again, to rounding
    changed = {
        name
        for name, w in model.named_parameters()
        if not torch.allclose(w, before[name], rtol=0, atol=TOLERANCE)
    }
    expected = {name for name in before if "lora_" in name or ".modules_to_save." in name}
    assert changed == expected
    assert sum("spectral.modules_to_save.default.w" in name for name in changed) == 4


def test_frequencies_are_saved_loaded_disabled_and_merged_with_the_adapter(tmp_path: Path) -> None:
    base = converted()
    model = moved(with_lora(with_trainable_frequencies(copy.deepcopy(base)), "self_attn"), 0.1)
    x = torch.randn(N, L, E)
    expected = model(x)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(
        with_trainable_frequencies(copy.deepcopy(base)), tmp_path
    )
    assert_close(loaded(x), expected, TOLERANCE)
    with model.disable_adapter():
        assert_close(model(x), base(x), TOLERANCE)
    merged = merge_and_unload(model)
    assert_close(merged(x), expected, TOLERANCE)
    fresh = converted()
    fresh.load_state_dict(merged.state_dict())  # strictly: the names are those of a converted model
    assert_close(fresh(x), expected, TOLERANCE)


def test_every_adapter_has_frequencies_of_its_own(tmp_path: Path) -> None:
    base = converted()
    model = with_lora(with_trainable_frequencies(copy.deepcopy(base)), "self_attn")
    x = torch.randn(N, L, E)
    with_trainable_frequencies(model, "other")
    model.add_adapter("other", model.peft_config["default"])
    expected = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        trained = {n: w for n, w in model.named_parameters() if w.requires_grad}
        assert sum(f"spectral.modules_to_save.{name}.w" in each for each in trained) == 4
        expected[name] = moved(model, 0.1)(x)
    assert not torch.equal(*expected.values())
    model.save_pretrained(tmp_path)
    fresh = with_trainable_frequencies(copy.deepcopy(base))
    loaded: Any = peft.PeftModel.from_pretrained(fresh, tmp_path)
    with_trainable_frequencies(loaded, "other")
    assert loaded.load_adapter(tmp_path / "other", "other").unexpected_keys == []
    for name, output in expected.items():
        loaded.set_adapter(name)
        assert_close(loaded(x), output, TOLERANCE)


def test_a_model_without_frequencies_is_an_error() -> None:
    with pytest.raises(ValueError, match="kernel='implicit', got a Classifier without"):
        with_trainable_frequencies(Classifier())


# --- transformers


def llama() -> Any:
    """A decoder in float64, with frequencies that are far from zero."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers_models import build, convert

    return convert(build("llama", head="ForCausalLM"))


@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["spectral"]),
        lambda: peft.LoraConfig(target_modules="all-linear", use_dora=True),
        lambda: peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=["frequencies", "dora", "ia3", "prompt"],
)
@pytest.mark.parametrize("kind", ["features", "state"])
def test_adapted_models_decode_with_either_cache(config: Any, kind: Any) -> None:
    from transformers_models import keyword_of_cache

    model = moved(peft.get_peft_model(llama(), config()).eval(), 0.1)
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = {"input_ids": prompt, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**options)
    kept = ikattn.decoding_cache(model, kind)
    assert torch.equal(model.generate(**options, **{keyword_of_cache(): kept}), expected)
    if kind == "features":
        assert all(layer.kept for layer in kept.layers)


def test_caches_see_another_adapter_whose_frequencies_differ() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["spectral"])
    model = peft.get_peft_model(llama(), config).eval()
    model.add_adapter("other", config)
    with torch.no_grad():
        for name, w in model.named_parameters():
            if "modules_to_save.other" in name:
                w.mul_(1.5)
        tokens = torch.tensor([[5, 6, 7, 8, 9]])
        features = ikattn.decoding_cache(model, "features")
        state = ikattn.decoding_cache(model, "state")
        for cache in (features, state):
            model(tokens[:, :3], past_key_values=cache)
        model.set_adapter("other")
        key, value = (x.repeat(1, 1, 2, 1) for x in torch.randn(2, 1, 2, 3, 4))
        features.layers[0].update(key, value)
        kernel = model.base_model.model.model.layers[0].self_attn.spectral
        w1, w2 = kernel(key, key, None)
        made = features.layers[0].features_of(kernel, w1, w2)
        assert_close(made.w1, w1, 0)
        with pytest.raises(NotImplementedError, match="other frequencies than those that Llama"):
            model(tokens[:, 3:4], past_key_values=state)


def test_models_of_transformers_save_frequencies_as_modules(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import ikattn

    sizes = {"n_embd": E, "n_head": H, "n_layer": 2, "vocab_size": 20}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    base = transformers.GPT2LMHeadModel(config).double().eval()
    ikattn.convert(base, num_frequencies=M)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn", "c_proj"], modules_to_save=["spectral"]
    )
    model = peft.get_peft_model(copy.deepcopy(base), lora)
    optimiser = torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=1.0)
    model(tokens, labels=tokens).loss.backward()
    optimiser.step()
    spectral = model.base_model.model.transformer.h[0].attn.spectral
    assert (spectral.modules_to_save["default"].w1 != spectral.original_module.w1).any()
    expected = model(tokens).logits
    with model.disable_adapter():
        assert_close(model(tokens).logits, base(tokens).logits, TOLERANCE)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert_close(loaded(tokens).logits, expected, TOLERANCE)
    merged = model.merge_and_unload()
    assert type(merged.transformer.h[0].attn.spectral).__name__ == "ImplicitKernel"
    assert_close(merged(tokens).logits, expected, TOLERANCE)
