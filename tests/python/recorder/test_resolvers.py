"""Where the parts of attention are found, and how one tells ``ikattn.record`` of a new family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agreement import assert_close
from ikattn.recorder import record
from ikattn.recorder.calls.projection import effective_projection
from ikattn.recorder.plan import resolvers
from ikattn.recorder.plan.resolvers import (
    AttentionParts,
    Resolver,
    find_attention,
    register_resolver,
)


@pytest.fixture
def registering(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Resolver], None]:
    """register_resolver, forgotten after the test."""
    monkeypatch.setattr(resolvers, "_registered", {})
    return register_resolver


class Block(nn.Module):
    """A block that nobody knows, around an attention that everybody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.after = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.attention(x, x, x, need_weights=False)[0])


def resolve_block(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
    if not ancestors or not isinstance(ancestors[0], Block):
        return None
    if not isinstance(module, nn.MultiheadAttention):
        return None
    return AttentionParts("mine", module.out_proj, "post", "self", norm=ancestors[0].after)


def test_registered_resolver_is_asked_first(registering: Any) -> None:
    model, x = Block().eval(), torch.randn(2, 5, 16)
    with torch.no_grad(), record(model, maps=None) as recording:
        model(x)
    assert recording.layers["attention"].family == "torch"
    registering("mine", resolve_block)
    with torch.no_grad(), record(model, maps=None) as recording:
        model(x)
    assert recording.layers["attention"].family == "mine"
    assert recording["attention"].with_norm.shape == (2, 5, 5)
    assert recording["attention"].encoder is None

    # the same layer as torch has it
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    layer.self_attn.load_state_dict(model.attention.state_dict())
    layer.norm1.load_state_dict(model.after.state_dict())
    with torch.no_grad(), record(layer, maps=("with_norm",)) as expected:
        layer(x)
    assert_close(recording["attention"].with_norm, expected["self_attn"].with_norm, 1e-6)


def test_registering_again_replaces_and_the_latest_is_asked_first(registering: Any) -> None:
    def named(family: str) -> Resolver:
        def resolve(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
            if not isinstance(module, nn.MultiheadAttention):
                return None
            return AttentionParts(family, module.out_proj)

        return resolve

    def family() -> str:
        (site,) = find_attention(Block())
        assert isinstance(site.parts, AttentionParts)
        return site.parts.family

    registering("a", named("first"))
    registering("b", named("second"))
    assert family() == "second"
    registering("a", named("third"))
    assert family() == "third"


def test_resolver_may_refuse_with_a_reason(registering: Any) -> None:
    def resolve(module: nn.Module, ancestors: Sequence[nn.Module]) -> None:
        if isinstance(module, nn.MultiheadAttention):
            raise NotImplementedError("it is Tuesday")

    registering("refusing", resolve)
    with pytest.raises(NotImplementedError, match="it is Tuesday"), record(Block()):
        pass


def test_resolver_must_be_callable() -> None:
    with pytest.raises(TypeError, match="callable"):
        register_resolver("mine", 3)  # type: ignore[arg-type]


def test_norm_that_never_runs_is_an_error(registering: Any) -> None:
    def resolve(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
        parts = resolve_block(module, ancestors)
        unused = nn.LayerNorm(16)
        return parts and AttentionParts("mine", parts.out_proj, "post", "self", norm=unused)

    registering("wrong", resolve)
    model = Block().eval()
    with (
        torch.no_grad(),
        record(model, maps=("with_norm",)) as recording,
        pytest.raises(RuntimeError, match="did not run"),
    ):
        model(torch.randn(1, 3, 16))
    assert recording.batches == []


def test_module_of_several_places_is_found_once() -> None:
    shared = nn.MultiheadAttention(16, 4)
    model = nn.ModuleDict({"one": shared, "two": shared, "three": nn.MultiheadAttention(16, 4)})
    assert [site.name for site in find_attention(model)] == ["one", "three"]


def test_layer_with_a_forward_of_its_own_is_not_taken_for_torchs() -> None:
    class Own(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return src + self.self_attn(src, src, src)[0]

    (site,) = find_attention(Own(16, 4))
    assert isinstance(site.parts, AttentionParts)
    assert site.parts.block == "found"  # by what flows


def test_an_out_projection_is_what_it_computes() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5))  # [in, out]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + 1.0

    class Triple(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(x)

    like, linear, conv, triple = torch.ones(1), nn.Linear(3, 5), Conv1D(), Triple(3, 5)
    assert effective_projection(linear, 3, like, "layer").weight is linear.weight
    weight, bias = effective_projection(conv, 3, like, "layer")
    torch.testing.assert_close(weight, conv.weight.T)
    torch.testing.assert_close(bias, torch.ones(5))
    weight, bias = effective_projection(triple, 3, like, "layer")
    torch.testing.assert_close(weight, 3 * triple.weight)
    torch.testing.assert_close(bias, 3 * triple.bias)
    linear.register_forward_hook(lambda module, args, output: -output)
    torch.testing.assert_close(
        effective_projection(linear, 3, like, "layer").weight, -linear.weight
    )
    with pytest.raises(TypeError, match=r"a torch.*Bilinear, must be a linear map"):
        effective_projection(nn.Bilinear(2, 2, 2), 2, like, "layer")


def test_attention_function_of_transformers_is_recognised_in_a_class_of_ones_own(
    registering: Any,
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaAttention

    class MyAttention(LlamaAttention):
        pass

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, vocab_size=9)
    model = transformers.LlamaModel(config).eval()
    model.layers[0].self_attn.__class__ = MyAttention
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad(), record(model, maps=None) as recording:
        model(tokens)
    assert recording.layers["layers.0.self_attn"].family == "llama"
    assert recording["layers.0.self_attn"].with_residual.shape == (1, 3, 3)
