"""The attention implementation "ikattn_implicit" in tiny models with random weights."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import formula
import ikattn
from agreement import assert_close
from ikattn.integrations.transformers import from_pretrained, optimizers
from ikattn.integrations.transformers.kernels import ImplicitKernel
from programs import run_checked
from transformers_models import BERT, FAMILIES, FREQUENCIES, GROUPED, T5, build, convert, inputs_of
from transformers_models import IMPLICIT_TOLERANCE as TOLERANCE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

families = pytest.mark.parametrize("family", FAMILIES)

pytestmark = pytest.mark.usefixtures("float64_by_default")


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
def test_revert_gives_back_what_was_there(family: str) -> None:
    model, inputs = build(family), inputs_of(family)
    with torch.no_grad():
        expected = call(model, inputs)
    config, names = model.config.to_dict(), list(model.state_dict())
    ikattn.revert(convert(model))
    assert list(model.state_dict()) == names
    assert model.config.to_dict() == config
    with torch.no_grad():
        found = call(model, inputs)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


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
def test_a_saved_model_loaded_without_its_frequencies_is_never_softmax(family, tmp_path):
    model = convert(build(family))
    model.save_pretrained(tmp_path)
    bare = type(model).from_pretrained(tmp_path).to(torch.float64).eval()
    with pytest.raises(RuntimeError, match='"ikattn_implicit" but no frequencies: call'):
        bare(**inputs_of(family))
    again = from_pretrained(type(model), tmp_path)
    again.save_pretrained(tmp_path / "again")
    assert '"attn_implementation": "ikattn_implicit (import ikattn' in (
        tmp_path / "again" / "config.json"
    ).read_text(encoding="utf-8")
    softmax = type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    assert softmax.config._attn_implementation == "sdpa"


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
    ikattn.convert(model, num_frequencies=FREQUENCIES)  # a second time
    assert {*model.parameters()} == parameters
    with pytest.raises(ValueError, match=r"has kernels with .*: 5.* already, got .*: 7"):
        ikattn.convert(model, num_frequencies=7)


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


def test_padding_alone_is_one_row_for_all_queries() -> None:
    convert(build("bert"))
    masks = transformers.AttentionMaskInterface()
    shown = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    functions = transformers.masking_utils
    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 4, "kv_length": 6, "q_offset": 2}
    for function in (functions.bidirectional_mask_function, functions.causal_mask_function):
        made, expected = (
            masks[name](**sizes, mask_function=function, attention_mask=shown)
            for name in ("ikattn_implicit", "sdpa")
        )
        assert torch.equal(made, expected)
        assert (made.stride(-2) == 0) == (function is functions.bidirectional_mask_function)


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
    model = ikattn.convert(transformers.BertForSequenceClassification(config), seed=0)
    before = {name: kernel.w1.detach().clone() for name, kernel in kernels(model).items()}
    examples = [{"input_ids": torch.arange(5) + i, "labels": i % 2} for i in range(8)]
    options = {"output_dir": str(tmp_path), "per_device_train_batch_size": 4, "report_to": "none"}
    options |= {"max_steps": 4, "save_steps": 2, "use_cpu": True, "learning_rate": 0.01}
    options |= {"disable_tqdm": True, "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(**options)
    transformers.Trainer(model, arguments, train_dataset=examples).train()
    assert all((kernel.w1 != before[name]).any() for name, kernel in kernels(model).items())

    fresh = ikattn.convert(transformers.BertForSequenceClassification(config), seed=1)
    trainer = transformers.Trainer(fresh, arguments, train_dataset=examples)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = model.state_dict()
    assert all(torch.equal(w, expected[name]) for name, w in fresh.state_dict().items())
    loaded = from_pretrained(
        transformers.AutoModelForSequenceClassification, tmp_path / "checkpoint-4"
    )
    assert all(torch.equal(w, expected[name]) for name, w in loaded.state_dict().items())


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_the_trainer_gets_groups_of_its_own_optimiser(optim: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    torch.set_default_dtype(torch.float32)
    config = transformers.BertConfig(**BERT, num_labels=2)
    model = ikattn.convert(transformers.BertForSequenceClassification(config), seed=0)
    options = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "max_steps": 2}
    options |= {"disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    args = transformers.TrainingArguments(
        **options, optim=optim, learning_rate=0.01, weight_decay=0.1, warmup_steps=10
    )
    examples = [{"input_ids": torch.arange(5) + i, "labels": i % 2} for i in range(16)]
    trainer = transformers.Trainer(
        model, args, train_dataset=examples, optimizers=optimizers(model, args)
    )
    kind, _ = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
    assert type(trainer.optimizer) is kind
    trainer.train()
    groups = {group["name"]: group for group in trainer.optimizer.param_groups}
    assert [group["weight_decay"] for group in groups.values()] == [0.1, 0, 0]
    assert groups["kernels"]["lr"] == pytest.approx(0.1 * groups["weights"]["lr"])  # in warm-up
    assert optimizers(model, args, frequency_lr=0.5)[0].param_groups[-1]["lr"] == 0.5
    assert {id(w) for w in groups["kernels"]["params"]} == {
        id(w) for name, w in model.named_parameters() if ".spectral." in name
    }


def test_optimisers_that_choose_parameters_by_themselves_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    chosen = lambda args, model: (torch.optim.SGD, {"lr": 0.1, "params": []})  # noqa: E731
    monkeypatch.setattr(transformers.Trainer, "get_optimizer_cls_and_kwargs", chosen)
    with pytest.raises(NotImplementedError, match="which chooses parameters by itself"):
        optimizers(build("bert"), args)


# --- Other processes


def test_models_of_another_process_run_once_ikattn_is_imported(tmp_path: Path) -> None:
    model = convert(build("bert", head="ForMaskedLM"))
    model.save_pretrained(tmp_path / "folder")
    torch.save(model, tmp_path / "model.pt")
    torch.save(model(torch.tensor([[1, 2, 3]])).logits, tmp_path / "expected.pt")
    program = """
import sys, torch, transformers
ids = torch.tensor([[1, 2, 3]])
try:
    transformers.AutoModelForMaskedLM.from_pretrained("folder")
except ValueError as error:
    assert "import ikattn, then ikattn.integrations.transformers.from_pretrained" in str(error)
assert "ikattn" not in sys.modules
model = torch.load("model.pt", weights_only=False)
assert torch.equal(model(ids).logits, torch.load("expected.pt"))
bare = transformers.AutoModelForMaskedLM.from_pretrained("folder")
try:
    bare(ids)
except RuntimeError as error:
    assert "no frequencies" in str(error)
else:
    raise AssertionError("softmax")
"""
    run_checked(sys.executable, "-W", "ignore", "-c", program, cwd=tmp_path)


def test_importing_ikattn_registers_with_the_library_once_that_is_imported(tmp_path: Path) -> None:
    program = """
import sys, ikattn
assert "transformers" not in sys.modules
import transformers
assert "ikattn_implicit" in transformers.AttentionInterface().valid_keys()
"""
    run_checked(sys.executable, "-W", "ignore", "-c", program, cwd=tmp_path)


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


def test_frequencies_made_in_inference_mode_can_be_trained() -> None:
    model = build("bert")
    with torch.inference_mode():
        convert(model)
    model(**inputs_of("bert")).last_hidden_state.sum().backward()
    assert all(kernel.w1.grad is not None for kernel in kernels(model).values())


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


@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.full)])
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


def test_another_attention_implementation_is_refused_with_the_way_out(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="saved without implicit attention"):
        from_pretrained(transformers.AutoModel, tmp_path)
    convert(build("bert")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got 'sdpa'; model\.set_attn_implementation"):
        from_pretrained(transformers.AutoModel, tmp_path, attn_implementation="sdpa")
    from_pretrained(transformers.AutoModel, tmp_path, attn_implementation="ikattn_implicit")


def test_options_of_numpy_are_saved(tmp_path: Path) -> None:
    options = {"p": np.float32(3.0), "num_frequencies": np.int64(5), "stationary": np.bool_(True)}
    ikattn.convert(build("bert"), **options).save_pretrained(tmp_path)
    (kernel, _) = kernels(from_pretrained(transformers.AutoModel, tmp_path)).values()
    assert (kernel.p, kernel.num_frequencies, kernel.stationary) == (3.0, 5, True)


def test_module_trackers_take_models_without_grad() -> None:
    model = convert(build("bert"))
    with torch.no_grad(), FlopCounterMode(display=False):
        model(**inputs_of("bert"))


def test_layers_that_a_checkpoint_lacks_get_new_frequencies(tmp_path: Path) -> None:
    convert(build("bert", num_hidden_layers=1)).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, num_hidden_layers=2)
    loaded = from_pretrained(transformers.BertForMaskedLM, tmp_path, config=config)
    bound = (4 * FREQUENCIES) ** -0.5
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
    ikattn.integrations.transformers.attention.register_implicit()
    model = build("bert")
    model.set_attn_implementation("ikattn_implicit")
    with pytest.raises(RuntimeError, match=r"call .*ikattn\.convert"):
        model(**inputs_of("bert"))


def test_models_that_cannot_be_changed_say_what_was_found() -> None:
    config = transformers.DebertaV2Config(**BERT)
    with pytest.raises(ValueError, match=r"DisentangledSelfAttention: .*AttentionInterface"):
        ikattn.convert(transformers.DebertaV2Model(config))
    with pytest.raises(ValueError, match=r"BertLayer is a part of .* expected the PreTrainedModel"):
        ikattn.convert(build("bert").encoder.layer[0])


def test_unknown_sizes_are_an_error_that_names_the_way_out() -> None:
    model = build("llama")
    attention = model.layers[1].self_attn
    attention.size_of_heads, attention.head_dim = attention.head_dim, None
    with pytest.raises(ValueError, match=r"LlamaAttention, got .*size_of_heads.*sizes=lambda"):
        ikattn.convert(model)
    assert not kernels(model)
    assert model.config._attn_implementation == "sdpa"
    ikattn.convert(model, sizes=lambda module: (4, 4))
    assert len(kernels(model)) == 2


@pytest.mark.parametrize(
    "options",
    [{"p": 0.5}, {"p": "two"}, {"num_frequencies": 0}, {"num_frequencies": 2.5}, {"spectral": "x"}],
    ids=str,
)
def test_bad_options_change_nothing(options: dict[str, Any]) -> None:
    model = build("bert")
    with pytest.raises(ValueError, match="must be"):
        ikattn.convert(model, **options)
    assert not kernels(model)


@pytest.mark.parametrize(
    ("family", "spectral"),
    [("bert", "mikan"), ("gpt2", "ikan"), ("llama", "ikan"), ("bert", "stationary")],
)
def test_generators_are_trained_saved_and_recorded(family, spectral, tmp_path):
    model = ikattn.convert(build(family), spectral=spectral, num_frequencies=8, seed=0)
    inputs = inputs_of(family)
    call(model.train(), inputs)["last_hidden_state"].sum().backward(retain_graph=True)
    if spectral != "stationary":
        ikattn.regularization_loss(model).backward()
    own = {name: w for name, w in model.named_parameters() if ".spectral." in name}
    assert own
    assert all(w.grad is not None and w.grad.isfinite().all() for w in own.values())
    expected = call(copy.deepcopy(model).eval(), inputs)["last_hidden_state"]
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(type(model), tmp_path).eval()
    torch.testing.assert_close(call(loaded, inputs)["last_hidden_state"], expected)
    with torch.no_grad(), ikattn.record(loaded, maps=("per_head",)) as recording:
        call(loaded, inputs)
    assert recording.names


def test_mikan_does_not_look_at_padding() -> None:
    model = ikattn.convert(build("bert"), spectral="mikan", num_frequencies=8).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".spectral." in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
        tokens = torch.tensor([[5, 3, 2, 7, 6]])
        mask = torch.tensor([[1, 1, 1, 0, 0]])
        padded = model(tokens, attention_mask=mask).last_hidden_state[:, :3]
        torch.testing.assert_close(padded, model(tokens[:, :3]).last_hidden_state)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_mikan_is_refused_where_attention_is_causal(family: str) -> None:
    model = build(family)
    with pytest.raises(ValueError, match=r"which is causal, see the future; expected 'ikan'"):
        ikattn.convert(model, spectral="mikan")
    assert not kernels(model)


def test_a_source_in_place_of_a_kernel_is_an_error() -> None:
    model = convert(build("bert"))
    model.encoder.layer[0].attention.self.spectral = ikattn.spectral.Mikan(2, 8, 8)
    with pytest.raises(RuntimeError, match=r"spectral is a Mikan, .* call ikattn\.convert"):
        call(model, inputs_of("bert"))


def test_capped_logits_are_refused_by_name() -> None:
    config = transformers.Gemma2Config(**GROUPED, head_dim=4)
    model = ikattn.convert(transformers.Gemma2Model(config))
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


# --- Switches under way


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
