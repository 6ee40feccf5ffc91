"""Layers of gated delta rules, against the recurrence and vectors that are pushed through it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from ikattn.explain.attribution._rollouts import _writing_of
from ikattn.explain.bertviz import to_bertviz
from ikattn.explain.comparison._distances import row_sums
from ikattn.maps import TopK, rollout, token_importance
from ikattn.maps.files import load
from ikattn.maps.page import _shown_maps
from ikattn.ops.delta_rule import DeltaRule
from ikattn.recorder import entry
from ikattn.recorder.calls.delta_rules import calls_delta_rule
from recorded_models import recorded
from tiny_transformers import build_tiny

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.skipif(
    not hasattr(transformers.integrations, "use_kernel_func_from_hub_with_fallback"),
    reason="this transformers calls its delta rules by attributes of layers",
)

LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
GATED = {
    **LAYERS,
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 4, "linear_value_head_dim": 6},
}
KIMI = {**LAYERS, "linear_num_heads": 4, "linear_head_dim": 6, "num_key_value_heads": 4}
INDEXER = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 4},
    **{"indexer_budget": 4, "indexer_compress_ratio": 2},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": GATED,
    "qwen3_5_text": GATED,
    "qwen3_5_moe_text": GATED,
    "qwen4_exp_text": GATED | INDEXER,
    "olmo_hybrid": GATED | {"linear_num_key_heads": 4},
    "lara_mini": GATED,
    "kimi_linear": KIMI,
    "bailing_hybrid": KIMI,
    "glm5_next_text": KIMI | {"qk_rope_head_dim": 0},
}
SCAN = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2}
SCANS: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 6, "n_groups": 2, "expand": 2},
    "bamba": SCAN | {"attn_layer_indices": [1]},
    "granitemoehybrid": SCAN | {"layer_types": ["mamba", "attention"]},
    "falcon_h1": SCAN | {"mamba_d_ssm": 32},
    "nemotron_h": {
        **{"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2},
        "layer_types": ["mamba", "attention"],
    },
}
FAMILIES |= SCANS
# Their residual is several streams, or their block adds two branches.
WITHOUT_BLOCK = ("qwen4_exp_text", "glm5_next_text", "falcon_h1")


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The outputs ``[B, H, T, d_v]``, token by token."""
    state = q.new_zeros(*q.shape[:2], q.size(-1), v.size(-1))
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    found = []
    for t in range(q.size(2)):
        state = state * g[:, :, t].exp().unsqueeze(-1)
        read = (state * k[:, :, t].unsqueeze(-1)).sum(-2)
        write = (v[:, :, t] - read) * beta[:, :, t].unsqueeze(-1)
        state = state + k[:, :, t].unsqueeze(-1) * write.unsqueeze(-2)
        found.append((state * q[:, :, t].unsqueeze(-1)).sum(-2))
    return torch.stack(found, 2)


@pytest.mark.parametrize("T", [1, 64, 200])
@pytest.mark.parametrize("decays", [1, 8])
def test_weights_of_a_delta_rule_are_those_of_its_recurrence(T: int, decays: int) -> None:
    torch.manual_seed(0)
    q, k = F.normalize(torch.randn(2, 2, 3, T, 8).double(), dim=-1)
    g, beta = -3 * torch.rand(2, 3, T, decays).double(), 2 * torch.rand(2, 3, T).double()
    g = g.squeeze(-1)
    expected = recurrence(q, k, torch.eye(T).double().expand(2, 3, T, T), g, beta)
    rule = DeltaRule.of(q, k, g, beta, beta, torch.zeros_like(beta))
    for start, end, S in ((0, T, T), (T // 3, T // 2, T), (T - 1, T, T), (0, T // 2, T // 2)):
        found = rule.rows(start, end, S)
        torch.testing.assert_close(found, expected[:, :, start:end, :S], rtol=0, atol=1e-12)


def test_weights_of_a_delta_rule_have_gradients() -> None:
    torch.manual_seed(0)
    given = [torch.randn(1, 2, 5, 3).double() for _ in range(3)]
    given += [torch.rand(1, 2, 5).double() for _ in range(3)]
    given[2] = -given[2].square()
    leaves = [x.requires_grad_() for x in given]
    assert torch.autograd.gradcheck(lambda *x: DeltaRule.of(*x).rows(1, 5, 5), leaves)


def tiny(kind: str) -> Any:
    return build_tiny(kind, **FAMILIES[kind]).float()


def text(L: int, padded: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 40, (2, L))
    ids[1, :padded] = 0
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class Noted:
    """The arguments and heads of the first layer's rule, and what its out-projection got."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        rules = ((module, calls_delta_rule(module)) for module in model.modules())
        module = next(module for module, calls in rules if calls)
        space = vars(sys.modules[type(module).__module__])
        ends = ("chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
        name = next(name for name in space if name.endswith(ends))
        self.rule, self.heads = space[name], []
        self.value = 0 if name.endswith("scan") else 2  # its place among the arguments

        def noting(*args: Any, **kwargs: Any) -> Any:
            if not self.heads:
                self.args, self.kwargs = args, kwargs
            found = self.rule(*args, **kwargs)
            self.heads.append(found[0] if isinstance(found, tuple) else found)
            return found

        monkeypatch.setitem(space, name, noting)
        self.out = next(m for n, m in module.named_children() if n in ("out_proj", "o_proj"))
        self.inputs: list[Tensor] = []
        self.out.register_forward_pre_hook(lambda m, x: self.inputs.append(x[0]))

    def _outputs(self, value: Tensor) -> Tensor:
        args = [*self.args]
        args[self.value] = value
        found = self.rule(*args, **self.kwargs)
        return (found[0] if isinstance(found, tuple) else found).double()

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Weights ``[B, H, L, S]``, and vectors ``[B, L, S, H, D]`` in the out-projection."""
        value = self.args[self.value]
        heads = self.heads[0].double()
        factor = (self.inputs[0].double().reshape(value.shape) / heads).nan_to_num(0, 0, 0)
        weight = self.out.weight.double().unflatten(-1, value.shape[2:])
        weights, found = [], []
        for j in range(value.size(1)):
            own = torch.zeros_like(value)
            own[:, j] = 1
            weights.append(self._outputs(own)[..., 0])
            own[:, j] = value[:, j]
            found.append(torch.einsum("blhd,ehd->blhe", self._outputs(own) * factor, weight))
        return torch.stack(weights, -1).transpose(1, 2), torch.stack(found, 2)


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_maps_of_delta_rules_are_those_of_explicit_vectors(kind, monkeypatch):
    model, call = tiny(kind), text(70 if kind in ("qwen3_next", "kimi_linear") else 9, padded=3)
    expected_output = model(**call)[0]
    noted = Noted(model, monkeypatch)
    inputs: dict[str, Tensor] = {}
    layer = model.layers[0]
    for name in ("input_layernorm", "post_attention_layernorm"):
        if kind not in (*WITHOUT_BLOCK, *SCANS, "olmo_hybrid"):
            getattr(layer, name).register_forward_hook(
                lambda m, x, y, name=name: inputs.update({name: (x[0].double(), y.double())})
            )
    with ikattn.record(model, "all", check="all") as recording:
        output = model(**call)[0]
    there = call["attention_mask"].bool()
    torch.testing.assert_close(output[there], expected_output[there], rtol=0, atol=0)
    maps = recording[0]
    assert recording.left_out == ()
    assert recording.layers[recording.names[0]].family == kind
    weights, vectors = noted.vectors()
    pairs = there[:, :, None] & there[:, None]

    def check(found: Tensor | None, expected: Tensor, mask: Tensor) -> None:
        assert found is not None
        expected = expected.float().where(mask, 0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)

    check(maps.weights, weights, pairs[:, None])
    assert bool((maps.weights < 0).any())
    check(maps.per_head, vectors.norm(dim=-1).permute(0, 3, 1, 2), pairs[:, None])
    check(maps.summed, vectors.sum(3).norm(dim=-1), pairs)
    if not inputs:
        assert (maps.with_residual is None) == (kind in WITHOUT_BLOCK)
        return
    residual, (total, read) = inputs["input_layernorm"][0], inputs["post_attention_layernorm"]
    whole = vectors.sum(3) + torch.eye(residual.size(1))[None, :, :, None] * residual.unsqueeze(2)
    check(maps.with_residual, whole.norm(dim=-1), pairs)
    torch.testing.assert_close(whole.sum(2)[there], total[there], rtol=1e-4, atol=1e-4)
    after = whole * (read / total).unsqueeze(2)
    check(maps.encoder, after.norm(dim=-1), pairs)


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear", "bamba"])
@torch.no_grad()
def test_steps_of_a_cache_have_the_rows_of_a_whole_call(kind: str) -> None:
    model, call = tiny(kind), text(70, padded=3)
    names, cuts = ("weights", "summed", "with_residual"), ((0, 66), (66, 67), (67, 69), (69, 70))
    whole = recorded(model, call | {"use_cache": False}, names)
    cache = None
    with ikattn.record(model, names) as recording:
        for start, end in cuts:
            part = {"input_ids": call["input_ids"][:, start:end]}
            mask = call["attention_mask"][:, :end]
            cache = model(**part, attention_mask=mask, past_key_values=cache).past_key_values
    for batch, (start, end) in zip(recording.batches, cuts, strict=True):
        for name in names:
            found, expected = getattr(batch[0], name), getattr(whole[0], name)
            expected = expected[..., start:end, :end]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(batch[0].key_padding, whole[0].key_padding[:, :end])


@torch.no_grad()
def test_sequences_that_change_their_order_between_steps_keep_their_columns() -> None:
    model, ids = tiny("qwen3_next"), text(9)["input_ids"]
    swapped = ids.clone()
    swapped[:, :8] = ids.flip(0)[:, :8]
    whole = recorded(model, swapped, "summed")
    with ikattn.record(model, "summed") as recording:
        cache = model(ids[:, :8]).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        model(ids[:, 8:], past_key_values=cache)
    torch.testing.assert_close(recording.batches[1][0].summed, whole[0].summed[:, 8:])


@torch.no_grad()
def test_a_state_of_unrecorded_calls_is_refused() -> None:
    model, ids = tiny("qwen3_next"), text(9)["input_ids"]
    cache = model(ids[:, :8]).past_key_values
    with pytest.raises(NotImplementedError, match="a state that its last recorded call has not"):
        recorded(model, {"input_ids": ids[:, 8:], "past_key_values": cache}, "summed")


@torch.no_grad()
def test_padding_between_tokens_is_a_column() -> None:
    model, call = tiny("qwen3_next"), text(9)
    call["attention_mask"][0, 4] = 0
    maps = recorded(model, call, check="all", layers="*linear_attn")[0]
    assert maps.key_padding.sum() == 0
    assert maps.query_padding.nonzero().tolist() == [[0, 4]]
    assert bool((maps.summed[0, 5:, 4] > 0).all())


@torch.no_grad()
def test_reduced_maps_and_rows_of_a_delta_rule_are_those_of_its_maps() -> None:
    model, call = tiny("qwen3_5_text"), text(70, padded=3)
    whole, columns, rows = (
        recorded(model, call, ("weights", "summed"), **options)
        for options in ({}, {"reduce": "columns"}, {"queries": [-1, -4]})
    )
    for name in ("weights", "summed"):
        expected = getattr(whole[0], name)
        found = columns[0].reduced[name]
        torch.testing.assert_close(found, expected.sum(-2), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(getattr(rows[0], name), expected[..., [-1, -4], :])


@torch.no_grad()
def test_similarity_of_a_delta_rule_is_refused() -> None:
    model = tiny("qwen3_next")
    with pytest.raises(ValueError, match="its weights are those of a recurrent state"):
        recorded(model, text(5), "similarity")


@torch.no_grad()
def test_readers_of_weights_take_signs_for_what_they_are(tmp_path: Path) -> None:
    model, call = tiny("qwen3_next"), text(9, padded=3)
    recording = recorded(model, call)
    weights = recording[0].weights
    for refused in (rollout, partial(token_importance, position=-1)):
        with pytest.raises(ValueError, match=r"'weights' of layer .* has numbers below 0"):
            refused(recording, map="weights", residual=0.5)
    assert rollout(recording, map="encoder").isfinite().all()
    with pytest.raises(ValueError, match="numbers below 0"):
        to_bertviz(recording, "weights")
    assert to_bertviz(recording, "per_head")["attention"][0].min() >= 0
    top = recorded(model, call, "weights", reduce=TopK(2))[0].reduced["weights"]
    torch.testing.assert_close(top.values.abs(), weights.abs().topk(2).values)
    found = weights.gather(-1, top.sources.clamp_min(0)).where(top.sources >= 0, 0)
    torch.testing.assert_close(top.values, found)
    sums = row_sums(weights[0], weights[0].roll(1, -1))
    shares = weights[0].double().abs()
    shares = shares / shares.sum(-1, keepdim=True)
    torch.testing.assert_close(sums["entropy_a"], -(shares * shares.log2()).nansum((-1, -2)))
    maps = _shown_maps(recording[0])
    assert "per_head" in maps  # heads have a gate: it is no product of weights and value norms
    recording.save(tmp_path / "maps.npz")
    assert torch.equal(load(tmp_path / "maps.npz")[0].weights, weights)


@pytest.mark.parametrize("layer", [0, 1])
@torch.no_grad()
def test_what_gated_heads_write_into_a_logit_adds_up(layer: int) -> None:
    model, call = tiny("qwen3_next"), text(9)
    own = model.layers[layer]
    outputs: list[Tensor] = []
    out_proj = own.self_attn.o_proj if layer else own.linear_attn.out_proj
    out_proj.register_forward_hook(lambda m, x, y: outputs.append(y))
    gradient = torch.zeros(2, 9, 16)
    gradient[:, -1] = torch.randn(2, 16)
    writings = []
    selected = f"layers.{layer}.*"

    def note(run):
        writings.append(_writing_of(run, gradient)[0])

    with entry.recorded(model, ("alti",), layers=selected, to_cpu=False, on_run=note):
        model(**call)
    written = writings[0]
    torch.testing.assert_close(written.sum(-1), (outputs[0] * gradient).sum((1, 2)))
