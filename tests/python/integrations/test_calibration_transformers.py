"""ikattn.calibrate on models of transformers, and heads of them that keep softmax."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close
from ikattn.integrations.transformers import from_pretrained
from recorded_models import recorded
from transformers_models import BERT, FAMILIES, build, convert, inputs_of
from transformers_models import IMPLICIT_TOLERANCE as TOLERANCE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

families = pytest.mark.parametrize("family", FAMILIES)

pytestmark = pytest.mark.usefixtures("float64_by_default")


@torch.no_grad()
def hidden(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The last hidden state where tokens are."""
    output = model(**inputs)[0]
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return output if mask is None else output[mask.bool()]


def kernels(model: nn.Module) -> list[Any]:
    """The modules that know which heads compute softmax."""
    owners = [module for module in model.modules() if hasattr(module, "spectral")]
    return [x if isinstance(x, ikattn.MultiheadAttention) else x.spectral for x in owners]


@families
def test_every_layer_comes_nearer(family: str) -> None:
    torch.manual_seed(0)
    model, inputs = build(family), inputs_of(family)
    caches = getattr(model.config, "use_cache", None)
    convert(model, p=None)
    report = ikattn.calibrate(model, [inputs], steps=20, output_steps=10, train="attention")
    assert len(report) == len(kernels(model))
    for layer in report:
        assert (layer.after <= layer.before).all(), layer
        assert layer.output_before is not None, layer
        assert layer.output_after is not None, layer
        assert layer.output_after <= layer.output_before, layer
    assert model.config._attn_implementation == "ikattn_implicit"
    assert getattr(model.config, "use_cache", None) == caches


@families
def test_heads_that_keep_softmax_give_what_it_gave(family: str) -> None:
    """All of them, so that masks, scalings, biases and grouped heads are those of the model."""
    torch.manual_seed(0)
    model, inputs = build(family), inputs_of(family)
    expected = hidden(model, inputs)
    convert(model)
    ikattn.calibrate(model, [inputs], steps=1, output_steps=0, keep=1e-9)
    assert all(kernel.split_heads().implicit == () for kernel in kernels(model))
    assert_close(hidden(model, inputs), expected, TOLERANCE)


@families
def test_maps_are_of_each_head_s_own_kernel(family: str) -> None:
    model, inputs = convert(build(family)), inputs_of(family)
    weights = {}
    for kept in (None, True, False):  # none, all, every other head
        for kernel in kernels(model):
            heads = torch.arange(kernel.num_heads) % 2 == 0
            kernel.keep_softmax(None if kept is None else heads | kept)
        recording = recorded(model, inputs, "weights", check="all")
        first = next(iter(recording.batches[0].values()))  # the layers after it see other input
        weights[kept] = first.weights
    assert_close(weights[False][:, ::2], weights[True][:, ::2], TOLERANCE)
    assert_close(weights[False][:, 1::2], weights[None][:, 1::2], TOLERANCE)


def test_a_model_of_two_kernels_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = convert(build("llama", head="ForCausalLM")), inputs_of("llama")
    report = ikattn.calibrate(model, [inputs], steps=2, output_steps=0)
    errors = torch.cat([layer.after for layer in report])
    report = ikattn.calibrate(
        model, [inputs], steps=1, output_steps=0, keep=errors.median().item() * 0.99
    )
    kept = [layer.softmax_heads for layer in report]
    assert 0 < sum(map(len, kept)) < errors.numel()
    assert "softmax in heads" in "\n".join(map(str, report))
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(transformers.AutoModelForCausalLM, tmp_path).eval()
    assert [kernel.softmax_heads.nonzero().flatten().tolist() for kernel in kernels(loaded)] == [
        list(heads) for heads in kept
    ]
    assert_close(hidden(loaded, inputs), hidden(model, inputs), TOLERANCE)
    again = copy.deepcopy(model)
    ikattn.calibrate(again, [inputs], steps=0, output_steps=0, keep=10.0)  # no head any more
    again.save_pretrained(tmp_path / "again")
    loaded = from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "again").eval()
    assert_close(hidden(loaded, inputs), hidden(again, inputs), TOLERANCE)
    # gradients, weights, caches
    output = model(**inputs, output_attentions=True)
    assert output.attentions[0].sum(-1).allclose(torch.ones(()))
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    tokens = inputs["input_ids"][:1, :4]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    found = model.generate(tokens, **options)
    assert torch.equal(found, model.generate(tokens, use_cache=False, **options))
    with pytest.raises(NotImplementedError, match="softmax heads"):
        model.generate(tokens, past_key_values=ikattn.decoding_cache(model, "state"), **options)


def test_heads_with_softmax_that_the_config_does_not_name_are_not_lost(tmp_path: Path) -> None:
    model = convert(build("bert"))
    kernels(model)[0].keep_softmax(torch.tensor([True, False, False, False]))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="do not agree on whether heads compute softmax"):
        from_pretrained(transformers.BertModel, tmp_path)


def test_frequencies_of_another_number_are_no_checkpoint(tmp_path: Path) -> None:
    model = convert(build("bert"), num_frequencies=4)
    model.config.ikattn_implicit["num_frequencies"] = 8
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        from_pretrained(transformers.BertModel, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.full((2, 6), 99)}, r"input_ids must be in \[0, 30\).*got 99 to 99"),
        ({"input_ids": torch.tensor([[5]]), "attention_mask": None}, "several tokens, got one key"),
        ({"attention_mask": torch.zeros(2, 6).long()}, "nothing but padding"),
        ({"use_cache": True}, "without a cache of keys, got one in batch 0"),
        ({"past_key_values": transformers.DynamicCache()}, "without a cache of keys"),
    ],
    ids=["vocabulary", "one token", "padding", "use_cache", "cache"],
)
def test_data_that_nothing_can_be_fitted_to(change: dict[str, Any], message: str) -> None:
    model = convert(build("bert"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        ikattn.calibrate(model, [inputs_of("bert") | change], steps=1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.config._attn_implementation == "ikattn_implicit"


@pytest.mark.parametrize("alone", [True, False])
def test_positional_ids_are_looked_at(alone: bool) -> None:
    ids = torch.full((2, 6), 99)
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 30\).*got 99 to 99"):
        ikattn.calibrate(convert(build("bert")), [ids if alone else (ids,)], steps=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "all"}, "train must be one of"),
        ({"output_steps": -1}, "output_steps must not be negative, got -1"),
        ({"keep": 0.0}, "keep must be a positive number, got 0.0"),
        ({"projection_learning_rate": float("nan")}, "projection_learning_rate must be a positive"),
    ],
    ids=["train", "output_steps", "keep", "rate"],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    model = convert(build("bert"))
    with pytest.raises(ValueError, match=message):
        ikattn.calibrate(model, [inputs_of("bert")], **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_of_16_bits_are_trained_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = convert(build("bert"), p=None).to(dtype)
    (before,) = {x.dtype for x in model.parameters()}
    report = ikattn.calibrate(
        model, [inputs_of("bert")], steps=5, output_steps=20, train="attention"
    )
    assert all(x.output_after < x.output_before for x in report)  # type: ignore[operator]
    assert {x.dtype for x in model.parameters()} == {before}
    assert hidden(model, inputs_of("bert")).isfinite().all()


def test_only_what_is_named_changes() -> None:
    torch.manual_seed(0)
    model, inputs = convert(build("bert")), inputs_of("bert")
    model.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}

    def changed() -> set[str]:
        return {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}

    ikattn.calibrate(model, [inputs], select="encoder.layer.1.*", steps=3, output_steps=3)
    own = "encoder.layer.1.attention.self"
    assert changed() <= {f"{own}.spectral.w1", f"{own}.spectral.w2"}
    ikattn.calibrate(model, [inputs], steps=3, output_steps=30, train="attention")
    assert not any(
        "output.dense" in name or "0.attention.self.query.w" in name for name in changed()
    )
    assert f"{own}.key.weight" in changed()
    assert all(x.grad is None for x in model.parameters())


def test_a_shared_layer_is_fitted_to_all_its_calls() -> None:
    torch.manual_seed(0)
    model, inputs = convert(build("albert"), p=None), inputs_of("albert")
    (layer,) = ikattn.calibrate(model, [inputs], steps=3, output_steps=60, train="attention")
    assert layer.output_after < layer.output_before  # type: ignore[operator]


def test_frequencies_of_generators() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT)
    model = transformers.BertModel(config).double().eval()
    ikattn.convert(model, spectral="ikan", num_frequencies=4, seed=0)
    report = ikattn.calibrate(model, [inputs_of("bert")], steps=5, output_steps=5)
    assert str(report).startswith("layer ")


def test_layers_all_of_whose_heads_keep_softmax_need_no_steps_on_outputs() -> None:
    torch.manual_seed(0)
    model, inputs = build("bert"), inputs_of("bert")
    expected = hidden(model, inputs)
    convert(model)
    report = ikattn.calibrate(model, [inputs], steps=1, output_steps=2, keep=1e-9)
    assert all(layer.output_after < 1e-9 for layer in report)  # type: ignore[operator]
    ikattn.calibrate(model, [inputs], steps=1, output_steps=2)
    assert_close(hidden(model, inputs), expected, TOLERANCE)


def test_cross_attention_of_equal_lengths_has_the_decoder_s_queries() -> None:
    """Padding of the encoder says nothing of the decoder's tokens, nor of queries across."""
    torch.manual_seed(0)
    model = convert(build("t5"), p=None)
    tokens = torch.randint(5, 30, (6, 8))
    mask = torch.zeros(6, 8).long()
    mask[:, :2] = 1
    inputs = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": tokens}
    report = ikattn.calibrate(model, [inputs], steps=0, output_steps=0)
    own, across = (
        next(x.before for x in report if f"decoder.block.0.layer.{n}" in x.names[0]) for n in (0, 1)
    )
    implicit = recorded(model, inputs, "weights")
    model.set_attn_implementation("sdpa")
    softmax = recorded(model, inputs, "weights")
    name = next(x.names[0] for x in report if "decoder.block.0.layer.0" in x.names[0])
    found, expected = (x.batches[0][name].weights[2].double() for x in (implicit, softmax))
    error = (found - expected).square().sum((1, 2)) / expected.square().sum((1, 2))
    assert_close(own, error.sqrt(), 1e-5)
    assert (across > 0).all()


def test_long_calls_keep_several_queries_of_a_sequence() -> None:
    torch.manual_seed(0)
    model = convert(build("gpt2", n_positions=64, n_layer=1), p=None)
    tokens = torch.randint(5, 30, (128, 64))
    (layer,) = ikattn.calibrate(model, [{"input_ids": tokens}], steps=0, output_steps=0)
    (small,) = ikattn.calibrate(model, [{"input_ids": tokens[:8]}], steps=0, output_steps=0)
    assert (layer.before > 0.3 * small.before).all()


def test_an_error_on_the_way_leaves_a_model_that_can_be_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = convert(build("t5")), inputs_of("t5")
    one = inputs | {"decoder_input_ids": torch.tensor([[5], [6]]), "decoder_attention_mask": None}
    with pytest.raises(ValueError, match="several tokens"):
        ikattn.calibrate(model, [one], steps=1, keep=1e-9)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(transformers.T5Model, tmp_path).eval()
    assert_close(hidden(loaded, inputs), hidden(model, inputs), TOLERANCE)


def test_a_part_of_a_hybrid_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = convert(build("bert")), inputs_of("bert")
    ikattn.calibrate(model, [inputs], steps=1, output_steps=0, keep=1e-9)
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, num_hidden_layers=1)
    part = from_pretrained(transformers.BertModel, tmp_path, config=config)
    assert kernels(part)[0].split_heads().implicit == ()


def test_what_a_model_draws_at_random_is_the_same_for_both_attentions() -> None:
    torch.manual_seed(0)

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convert(build("bert"), p=None)

        def forward(self, input_ids: Tensor) -> Any:
            embeddings = self.inner.get_input_embeddings()(input_ids)
            return self.inner(inputs_embeds=embeddings + torch.randn_like(embeddings))

    state = torch.random.get_rng_state()
    model = Noisy()
    torch.random.set_rng_state(state)
    tokens = torch.randint(5, 30, (10, 6), generator=torch.Generator().manual_seed(0))
    report = ikattn.calibrate(model, [{"input_ids": tokens}], steps=20, output_steps=20)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(layer.output_after < 0.9 for layer in report)  # type: ignore[operator]
