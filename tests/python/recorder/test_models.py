"""``ikattn.record`` on models of Hugging Face transformers, tiny and with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agreement import assert_close, assert_identical
from families import ALONE, POST, PRE, WRITTEN_OUT
from ikattn.maps.contribution_maps import Contributions, streamed_contributions
from ikattn.recorder import record
from ikattn.recorder.calls import attention_call
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.plan.resolvers import find_attention
from ikattn.recorder.plan.run_maps import Surroundings
from ikattn.recorder.runs import making
from recorded_models import pair_vectors, recorded, run_in_threads, through_norm
from tiny_transformers import build_tiny, tiny_inputs
from transformers_models import BART, BERT, FAMILIES, GROUPED, IMAGE, build, inputs_of

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-11  # all of it in float64
FLOAT32_SOFTMAX = 2e-7  # what the eager implementation of many families has in float64 too
families = pytest.mark.parametrize("family", FAMILIES)

pytestmark = pytest.mark.usefixtures("float64_by_default")


class Probe:
    """The inputs and outputs of every module that ran, in the order of the runs."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[nn.Module, list[Tensor]] = {}
        self.outputs: dict[nn.Module, list[Tensor]] = {}
        for module in model.modules():
            module.register_forward_hook(self._hook, with_kwargs=True)

    def _hook(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        found = output[0] if isinstance(output, tuple) else output
        self.inputs.setdefault(module, []).append(given[0] if given else torch.empty(0))
        if isinstance(found, Tensor):
            self.outputs.setdefault(module, []).append(found)

    def was_input(self, x: Tensor) -> bool:
        """Whether some module was given ``x``, [B, L, D]."""
        every = (given for runs in self.inputs.values() for given in runs)
        same = (given for given in every if given.numel() == x.numel())
        return any(torch.allclose(given.reshape(x.shape), x, atol=1e-10) for given in same)

    def norm_of(self, x: Tensor) -> nn.Module | None:
        """The first norm that was given ``x``."""
        for module, runs in self.inputs.items():
            is_norm = "Norm" in type(module).__name__
            same = (each.reshape(x.shape) for each in runs if each.numel() == x.numel())
            if is_norm and any(torch.allclose(each, x, atol=1e-10) for each in same):
                return module
        return None


def eager_weights(family: str, model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Attention weights as transformers returns them, of encoder, then of decoder layers."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    model.set_attn_implementation("sdpa")
    if "decoder_attentions" not in outputs:
        return list(outputs.attentions)
    of_decoder = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
    return [*outputs.encoder_attentions, *(weights for pair in of_decoder for weights in pair)]


def values_passed(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The value [B, G, S, d_v] of every call of F.scaled_dot_product_attention."""
    values: list[Tensor] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        values.append(value)
        return original(query, key, value, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = spy
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    return values


def outputs_of(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    found = model(**inputs)
    return [x for x in found.to_tuple() if isinstance(x, Tensor)]


def without_padding(pairs: Tensor, maps: Any) -> Tensor:
    """[B, (H,) L, S] with 0 where query or key is padding."""
    heads = (slice(None),) + (None,) * (pairs.dim() - 3)
    if maps.query_padding is not None:
        pairs = pairs.masked_fill(maps.query_padding[heads][..., None], 0)
    if maps.key_padding is not None:
        pairs = pairs.masked_fill(maps.key_padding[heads][..., None, :], 0)
    return pairs


@families
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_recording_changes_no_output_and_leaves_no_trace(family: str, implementation: str) -> None:
    model, inputs = build(family, implementation), inputs_of(family)
    with torch.no_grad():
        before = outputs_of(model, inputs)
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        with record(model, maps=None):
            during = outputs_of(model, inputs)
        after = outputs_of(model, inputs)
    assert_identical(during, before)
    assert_identical(after, before)
    assert model.config._attn_implementation == implementation
    left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert left == hooks


@families
def test_weights_are_those_of_the_eager_implementation(family: str) -> None:
    model, inputs = build(family), inputs_of(family)
    expected = eager_weights(family, model, inputs)
    with torch.no_grad(), record(model, maps="ledger") as recording:
        for implementation in ("sdpa", "eager"):  # which may change within the block
            model.set_attn_implementation(implementation)
            model(**inputs)
    for batch in recording.batches:
        found = [maps for name, maps in batch.items() if "head" not in name]
        assert len(found) == len(expected)
        for maps, weights in zip(found, expected, strict=True):
            assert_close(maps.weights, without_padding(weights, maps), FLOAT32_SOFTMAX)
            assert_close(maps.per_head, maps.weights * maps.value_norms.unsqueeze(-2), TOLERANCE)
            if family != "t5":  # whose position bias is a third factor
                product = maps.similarity * maps.magnitude.unsqueeze(-2)
                sums = product.sum(-1, keepdim=True).clamp_min(1e-300)
                assert_close(product / sums, maps.weights, 1e-9)


@families
def test_vectors_with_the_norms_found_make_up_what_the_blocks_compute(family: str) -> None:
    model, inputs = build(family), inputs_of(family)
    block = FAMILIES[family][2]
    values = values_passed(model, inputs)
    with torch.no_grad():
        with record(model, maps=None) as recording, record(model, maps="weights") as weights:
            model(**inputs)
        probe = Probe(model)
        model(**inputs)
    sites = {site.name: site for site in find_attention(model)}
    runs: dict[nn.Module, int] = {}
    for name, maps in recording.batches[0].items():
        site = sites[name.split("#")[0]]
        parts: Any = site.parts
        if isinstance(site.module, nn.MultiheadAttention):
            continue  # the pooling head of SigLIP
        run = runs[site.module] = runs.get(site.module, -1) + 1
        value = values.pop(0)
        a = weights[name].weights
        weight = parts.out_proj.weight
        is_transposed = type(parts.out_proj).__name__ == "Conv1D"  # [in, out]
        y = pair_vectors(a, value, weight.T if is_transposed else weight)
        assert_close(maps.summed, y.norm(dim=-1), TOLERANCE, "summed")
        # rows of padding are no rows of the output
        bias = getattr(parts.out_proj, "bias", None)
        output = y.sum(2) if bias is None else y.sum(2) + bias
        rows = torch.ones(output.shape[:2], dtype=torch.bool)
        if maps.query_padding is not None:
            rows = ~maps.query_padding
        assert_close(output[rows], probe.outputs[parts.out_proj][run][rows], TOLERANCE, "output")

        entrance = parts.pre_norm or site.module
        residual = probe.inputs[entrance][run]
        total = probe.outputs[parts.out_proj][run] + residual
        assert recording.layers[name].block == ("pre" if block == "parallel" else block)
        if block != "parallel":
            assert probe.was_input(total), "the residual is not what is added"
        if parts.kind == "self":
            own = torch.eye(y.size(1))[None, :, :, None]
            y = (y + own * residual.unsqueeze(2)) * rows[..., None, None]
            assert_close(maps.with_residual, y.norm(dim=-1), TOLERANCE, "with_residual")
        if block == "post":
            assert torch.allclose(probe.inputs[parts.norm][run], total, atol=1e-10)
            y = through_norm(y, parts.norm, probe.inputs[parts.norm][run])
            assert_close(maps.with_norm, y.norm(dim=-1), TOLERANCE, "with_norm")
            if parts.second_norm is not None:
                second = probe.inputs[parts.second_norm][run].reshape(total.shape)
                y = through_norm(y, parts.second_norm, second)
                assert_close(maps.encoder, y.norm(dim=-1), TOLERANCE, "encoder")
        else:
            assert maps.with_norm is None
            norm = probe.norm_of(total)
            assert (maps.encoder is None) == (norm is None) == (block == "parallel")
            if norm is not None:
                y = through_norm(y, norm, total)
                assert_close(maps.encoder, y.norm(dim=-1), TOLERANCE, "encoder")
    assert not values


@families
def test_padding_and_sides(family: str) -> None:
    model, inputs = build(family), inputs_of(family)
    recording = recorded(model, inputs, "summed")
    padding = inputs.get("attention_mask")
    target_padding = inputs.get("decoder_attention_mask")
    for name, maps in recording.batches[0].items():
        layer = recording.layers[name]
        of_keys, of_queries = padding, padding
        if layer.side == "decoder" and FAMILIES[family][3] in ("pair", "sound"):
            of_queries = target_padding
            of_keys = target_padding if layer.kind == "self" else padding
        for found, expected in ((maps.key_padding, of_keys), (maps.query_padding, of_queries)):
            if expected is None:
                assert found is None or not found.any()
            else:
                assert found.equal(expected == 0), name


def test_weights_that_are_never_held_are_made_of_what_the_model_gave(monkeypatch):
    """Queries and keys of 16 bits, for which GPUs have kernels of their own."""
    calls: list[dict[str, Any]] = []

    def streamed(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        calls.append({"query": query, "key": key, **options})
        return streamed_contributions(query, key, *args, **options)

    model, inputs = build("llama").bfloat16(), inputs_of("llama")
    held = recorded(model, inputs, "summed")
    monkeypatch.setattr(attention_call, "_FEW_WEIGHTS", 0)
    monkeypatch.setattr(attention_call, "streamed_contributions", streamed)
    recording = recorded(model, inputs, "summed")
    assert len(calls) == len(held.names)
    for call in calls:
        assert call["query"].dtype == call["key"].dtype == torch.bfloat16
        assert call["attn_mask"].dtype == torch.bool
        assert call["attn_mask"].size(1) == 1
        assert call["maps"] == {"summed"}
    for name in held.names:
        assert_close(recording[name].summed, held[name].summed, 1e-6, name)


def test_tensors_that_the_caller_fills_again_are_recorded_as_they_were() -> None:
    model, kinds = build("bert"), ("input_ids", "attention_mask")
    given = {name: torch.zeros(2, 4, dtype=torch.int64) for name in kinds}
    with record(model, to_cpu=False) as recording:
        for step in (1, 2):
            given["input_ids"].fill_(step)
            given["attention_mask"].fill_(1)[:, -step:] = 0
            model(**given)
    for tensor in given.values():
        tensor.fill_(3)
    for step, batch in enumerate(recording.batches, 1):
        padding = torch.arange(4).expand(2, 4) >= 4 - step
        assert_identical(batch.input_ids, torch.full((2, 4), step))
        assert_identical(batch.input_mask == 0, padding)
        for maps in batch.values():
            assert_identical(maps.key_padding, padding)
            assert_identical(maps.query_padding, padding)


def test_encoder_pass_of_generate_is_a_batch_of_its_own() -> None:
    config = transformers.BartConfig(**BART)
    model = transformers.BartForConditionalGeneration(config).double().eval()
    with record(model, maps=("summed",)) as recording:
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, min_new_tokens=2)
    sides = [{recording.layers[name].side for name in batch} for batch in recording.batches]
    assert sides[0] == {"encoder"}
    assert sides[1:]
    assert all(side == {"decoder"} for side in sides[1:])


def test_bert_decoder_with_cross_attention() -> None:
    model = build("bert", is_decoder=True, add_cross_attention=True)
    memory = torch.randn(2, 3, 16)
    recording = recorded(model, inputs_of("bert") | {"encoder_hidden_states": memory}, None)
    own = recording["encoder.layer.0.attention.self"]
    cross = recording["encoder.layer.0.crossattention.self"]
    assert recording.layers["encoder.layer.0.crossattention.self"].kind == "cross"
    assert own.with_norm.shape == (2, 6, 6)
    assert own.encoder is None
    assert cross.with_residual is None
    assert cross.encoder.shape == (2, 6, 3)


def test_task_model_and_its_part_are_recorded_alike() -> None:
    config = transformers.BertConfig(**BERT)
    model = transformers.BertForSequenceClassification(config).double().eval()
    inputs = inputs_of("bert")
    with torch.no_grad(), record(model, maps=None) as whole, record(model.bert, maps=None) as part:
        model(**inputs)
    assert whole.names == [f"bert.{name}" for name in part.names]
    for name in part.names:
        assert_identical([part[name].encoder], [whole[f"bert.{name}"].encoder])


def test_model_that_shares_a_config_is_not_disturbed() -> None:
    model = build("bert")
    other = transformers.BertModel(model.config).double().eval()
    inputs = inputs_of("bert")
    with torch.no_grad():
        before = outputs_of(other, inputs)
        with record(model) as recording:
            assert_identical(outputs_of(other, inputs), before)
    assert recording.batches == []


def test_threads_that_record_models_with_one_config() -> None:
    first = build("bert")
    models = [first, transformers.BertModel(first.config).double().eval()]
    tokens = [torch.randint(1, 30, (1, length)) for length in range(1, 7)]

    def made(number: int, length: int) -> Tensor:
        recording = recorded(models[number], tokens[length - 1], "encoder")
        return recording[recording.names[1]].encoder

    found: dict[tuple[int, int], Tensor] = {}

    def work(number: int) -> None:
        found.update({(number, length): made(number, length) for length in range(1, 7)})

    run_in_threads(lambda: work(0), lambda: work(1))
    assert first.config._attn_implementation == "sdpa"
    for call, encoder_map in found.items():
        assert_close(encoder_map, made(*call), TOLERANCE)
    assert len(found) == 12


def test_parts_of_one_model_may_have_different_implementations() -> None:
    config = transformers.CLIPConfig(text_config=BERT, vision_config=IMAGE, projection_dim=8)
    model = transformers.CLIPModel(config).double().eval()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    inputs = inputs_of("clip text") | inputs_of("clip vision")
    with torch.no_grad():
        before = outputs_of(model, inputs)
        with record(model, maps=None) as recording:
            after = outputs_of(model, inputs)
    assert_identical(after, before)
    assert len(recording.names) == 4
    assert model.text_model.config._attn_implementation == "eager"
    assert model.vision_model.config._attn_implementation == "sdpa"


def refused(model: nn.Module, **options: Any) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as error, record(model, **options):
        pass
    return str(error.value)


def test_maps_that_a_family_has_not_are_refused_before_anything_runs() -> None:
    for family in ("gpt2", "llama", "t5", "vit"):
        assert "before the attention" in refused(build(family), maps=("with_norm",))
    assert "not among its keys" in refused(build("bart"), maps=("with_residual",))
    recorded_encoder = recorded(build("bart"), inputs_of("bart"), "encoder", layers="encoder.*")
    assert recorded_encoder.names == ["encoder.layers.0.self_attn"]


@pytest.mark.parametrize("kind", ["bloom", "mpt", "big_bird", "deberta", "deberta-v2"])
@torch.no_grad()
def test_weights_that_a_module_writes_out_are_those_that_it_returns(kind: str) -> None:
    model = build_tiny(kind)
    inputs = tiny_inputs(model)
    with record(model, maps="weights", check="all") as recording:
        returned = model(**inputs, output_attentions=True)
    found = recording.batches[0].values()
    for maps, weights in zip(found, returned.attentions, strict=True):
        expected = without_padding(weights.to(maps.weights), maps)
        assert_close(maps.weights, expected, FLOAT32_SOFTMAX)
    with pytest.raises(ValueError, match="computes the weights itself"):
        recorded(model, inputs, "similarity")


def test_soft_caps_leave_similarity_and_magnitude_out() -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**GROUPED, head_dim=4, attn_logit_softcapping=1.0)
    model, tokens = transformers.Gemma2Model(config).double().eval(), torch.tensor([[3, 4, 5]])
    recording = recorded(model, tokens, check="all")
    assert recording[recording.names[0]].similarity is None
    with pytest.raises(ValueError, match="has no map 'similarity': its logits have a soft cap"):
        recorded(model, tokens, "similarity")


def test_other_implementations_are_refused() -> None:
    model = build("bert")
    model.config._attn_implementation_internal = "flex_attention"
    assert "flex_attention" in refused(model)
    assert model.config._attn_implementation == "flex_attention"


def test_chunked_feed_forward_is_refused_with_its_norm() -> None:
    model = build("bert", chunk_size_feed_forward=2)
    recorded(model, inputs_of("bert"), "with_norm")
    with pytest.raises(RuntimeError, match="chunk_size_feed_forward"):
        recorded(model, inputs_of("bert"), "encoder")


# --- Families that no table knows

# Post-norm encoders, whose second norm is found, too.
SECOND = ("ernie", "layoutlm", "markuplm", "roc_bert", "splinter", "bert-generation")


def explicit(call: AttentionCall, projection: Tensor, around: Surroundings) -> Tensor:
    """N_Res, from vectors of every pair."""
    y = pair_vectors(call.weights, call.value, projection)
    if around.scale is not None:
        y = y * around.scale
    if around.output_norm is not None:
        stats = around.output_norm
        y = y - y.mean(-1, keepdim=True) if stats.centered else y
        y = y * stats.weight / stats.scale[:, :, None, None]
    L, S = y.shape[1:3]
    rows = torch.arange(L)
    keys = rows + call.diagonal
    y[:, rows[keys < S], keys[keys < S]] += around.residual[:, keys < S]
    return y.norm(dim=-1)


@pytest.mark.parametrize("kind", [*PRE, *POST, *ALONE, *WRITTEN_OUT])
def test_maps_of_a_family_that_is_found_by_running(kind, monkeypatch):
    model = build_tiny(kind)
    seen: list[tuple[AttentionCall, Tensor, Surroundings, Contributions]] = []
    make_maps = making.make_maps

    def noting(call: AttentionCall, projection: Tensor, around: Surroundings, wanted: Any) -> Any:
        maps = make_maps(call, projection, around, wanted)
        seen.append((call, projection, around, maps))
        return maps

    monkeypatch.setattr(making, "make_maps", noting)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = model(**inputs)[0]
        with record(model, maps="all", check="all") as recording:
            found = model(**inputs)[0]
    torch.testing.assert_close(found, expected)
    blocks = {layer.block for layer in recording.layers.values()}
    usual = "post" if kind in POST else "none" if kind in ALONE else "pre"
    assert WRITTEN_OUT.get(kind, usual) in blocks
    if kind in SECOND:
        assert all(maps.encoder is not None for maps in recording.batches[0].values())
    for call, projection, around, maps in seen:
        if call.gate is not None:  # has its vectors in test_delta_rules.py
            continue
        there = torch.ones(call.sizes[0], call.sizes[2], dtype=torch.bool)
        if call.query_padding is not None:
            there = ~call.query_padding
        hidden = torch.zeros(call.sizes[0], call.sizes[3], dtype=torch.bool)
        hidden = hidden if call.key_padding is None else call.key_padding
        pairs = there[:, :, None] & ~hidden[:, None]
        norms = pair_vectors(call.weights, call.value, projection).norm(dim=-1)
        assert_close(maps.summed[pairs], norms[pairs], 1e-9, "summed")
        if maps.with_residual is not None:
            norms = explicit(call, projection, around)
            assert_close(maps.with_residual[pairs], norms[pairs], 1e-9, "with_residual")


# --- Families that gate their heads

SIZES = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 4},
    **{"num_key_value_heads": 2, "vocab_size": 40, "pad_token_id": 0, "num_hidden_layers": 2},
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
}


MIXED = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4},
}


@pytest.mark.parametrize("family", ["Qwen3Next", "Afmoe", "Laguna", "DiffLlama", "BitNet"])
@torch.no_grad()
def test_gated_families_of_transformers_are_recorded(family: str) -> None:
    torch.manual_seed(0)
    more = MIXED if family == "Qwen3Next" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    model = getattr(transformers, f"{family}Model")(config).float().eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    call = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    expected = model(**call)[0]
    with record(model, "all", check="all") as recording:
        found = model(**call)[0]
    torch.testing.assert_close(found, expected)
    maps = recording[recording.names[-1]]
    assert maps.with_residual is not None
    assert maps.encoder is not None
    torch.testing.assert_close(maps.weights[0].sum(-1), torch.ones(4, 4).float())


@torch.no_grad()
def test_heads_of_the_experts_that_a_token_is_routed_to_are_recorded() -> None:
    sizes = {"num_experts_per_tok": 2, "num_local_experts": 4, "kv_channels": 4}
    model = build_tiny("jetmoe", **sizes)
    model.set_attn_implementation("eager")
    layer, given = model.layers[0].self_attention, {}
    layer.register_forward_pre_hook(lambda _, args, own: given.update(own), with_kwargs=True)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])
    call = {"input_ids": ids, "attention_mask": (ids > 0).long(), "output_attentions": True}
    expected = model(**call)
    with record(model, "all", check="all") as recording:
        found = model(**call)
    torch.testing.assert_close(found[0], expected[0])
    maps = recording["layers.0.self_attention"]
    experts, value = layer.experts, layer.kv_proj(given["hidden_states"]).chunk(2, -1)[1]
    routed = experts.router.layer(given["hidden_states"]).topk(2)
    for b, i in [(0, 0), (0, 3), (0, 5), (1, 2), (1, 3)]:
        vectors = torch.zeros(6, 16).double()
        for j in range(2):  # its experts, each with two heads
            e, share = routed.indices[b, i, j], routed.values[b, i].softmax(-1)[j]
            weights = found.attentions[0][b, 2 * j : 2 * j + 2, i]
            assert_close(maps.weights[b, 2 * e : 2 * e + 2, i], weights, 1e-6, "weights")
            heads = torch.einsum("hs,shd->shd", weights, value[b].view(6, 2, 4)).flatten(1)
            vectors += share * heads @ experts.output_linear.weight[e].mT
        assert_close(maps.summed[b, i], vectors.norm(dim=-1), 1e-6, "summed")
    torch.testing.assert_close(maps.weights.sum((1, 3))[ids > 0], torch.full((10,), 4.0).double())
    # Steps have a row each, the last of the tokens until then.
    with record(model, "summed", check="all") as steps:
        cache = transformers.DynamicCache(config=model.config)
        for token in ids[:1].T:
            model(input_ids=token[None], cache=cache)
    for i, batch in enumerate(steps.batches):
        own = batch.layers["layers.0.self_attention"].summed[0, 0]
        torch.testing.assert_close(own, maps.summed[0, i, : i + 1])


def test_attention_function_of_transformers_is_recognised_in_a_class_of_ones_own() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    class MyAttention(LlamaAttention):
        pass

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, vocab_size=9)
    model = transformers.LlamaModel(config).eval()
    model.layers[0].self_attn.__class__ = MyAttention
    tokens = torch.tensor([[1, 2, 3]])
    recording = recorded(model, tokens, None)
    assert recording.layers["layers.0.self_attn"].family == "llama"
    assert recording["layers.0.self_attn"].with_residual.shape == (1, 3, 3)
