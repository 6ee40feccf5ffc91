"""timm's attention layer with the implicit kernel; where timm is, in its vision transformer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close
from ikattn.integrations.timm import ImplicitAttention

B, N, C, H, M = 2, 7, 12, 3, 5
TOLERANCE = 1e-12  # all of it in float64


class Cubic(ImplicitAttention):
    p, num_frequencies = 3.0, M


# Arguments that timm passes, and the defaults of its ViT.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "as in ViT": {"qkv_bias": True, "norm_layer": nn.LayerNorm},
    "norms": {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm},
    "other head size": {"attn_head_dim": 6, "dim_out": 8, "proj_bias": False},
}
masks = pytest.mark.parametrize("mask", [None, "bool", "float"])

pytestmark = pytest.mark.usefixtures("float64_by_default")


def by_reference(layer: ImplicitAttention, x: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (
        part.unflatten(-1, (H, -1)).transpose(1, 2)
        for part in nn.functional.linear(x, layer.qkv.weight, layer.qkv.bias).chunk(3, -1)
    )
    w1, w2 = layer.spectral.frequencies()
    heads = ikattn.reference.implicit_kernel_attention(
        layer.q_norm(q), layer.k_norm(k), v, w1, w2, p=layer.p, attn_mask=mask
    )
    return layer.proj(layer.norm(heads.transpose(1, 2).flatten(2)))


@masks
@pytest.mark.parametrize("options", CALLS)
def test_outputs_and_gradients_are_those_of_the_reference(options: str, mask: str | None) -> None:
    layer = Cubic(C, num_heads=H, **CALLS[options])
    x = torch.randn(B, N, C, requires_grad=True)
    visible = (torch.rand(B, 1, N, N) < 0.6) | torch.eye(N, dtype=torch.bool)
    given = {None: None, "bool": visible, "float": torch.randn(N, N)}[mask]
    results = []
    for output in (layer(x, attn_mask=given), by_reference(layer, x, given)):
        gradients = torch.autograd.grad(output.sin().sum(), [x, *layer.parameters()])
        results.append([output, *gradients])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, TOLERANCE, scale=1e-3)


def test_causal_attention_is_a_mask() -> None:
    layer = ImplicitAttention(C, num_heads=H)
    x, causal = torch.randn(B, N, C), torch.ones(N, N).tril().bool()
    assert_close(layer(x, is_causal=True), by_reference(layer, x, causal), TOLERANCE)


def test_dropout_is_for_training() -> None:
    layer = ImplicitAttention(C, num_heads=H, attn_drop=0.5)
    x = torch.randn(B, N, C)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_options_belong_to_the_class() -> None:
    class Stationary(ImplicitAttention):
        p, stationary = None, True

    class Wrong(ImplicitAttention):
        p = 0.5

    layer = Stationary(C, num_heads=H)
    assert (layer.p, layer.spectral.w2, layer.spectral.num_frequencies) == (None, None, 32)
    assert Cubic(C, num_heads=H).spectral.num_frequencies == M
    with pytest.raises(ValueError, match="p must be"):
        Wrong(C, num_heads=H)


def test_weights_of_timm_load_strictly_and_leave_frequencies() -> None:
    layer = ImplicitAttention(C, num_heads=H, qkv_bias=True)
    of_timm = {name: w + 1 for name, w in layer.state_dict().items() if "spectral" not in name}
    assert sorted(of_timm) == ["proj.bias", "proj.weight", "qkv.bias", "qkv.weight"]
    frequencies = layer.spectral.w1.detach().clone()
    layer.load_state_dict(of_timm)
    assert torch.equal(layer.qkv.weight, of_timm["qkv.weight"])
    assert torch.equal(layer.spectral.w1, frequencies)


def test_wrong_sizes_are_errors() -> None:
    with pytest.raises(ValueError, match="a multiple of num_heads, got 12 and 5"):
        ImplicitAttention(C, num_heads=5)
    with pytest.raises(ValueError, match="need a norm_layer"):
        ImplicitAttention(C, num_heads=H, qk_norm=True)


def test_layers_are_pickled() -> None:
    layer = Cubic(C, num_heads=H)
    x = torch.randn(B, N, C)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "scale_attn_norm": True}], ids=str)
def test_a_vision_transformer_of_timm_trains_with_it(options: dict[str, Any]) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": C, "depth": 2, "num_heads": H}
    build = timm.models.VisionTransformer
    model = build(**sizes, **options, attn_layer=ImplicitAttention, num_classes=2)
    stock = build(**sizes, **options, num_classes=2)
    model.load_state_dict(stock.state_dict())
    images = torch.randn(4, 3, 16, 16)
    assert not torch.allclose(model(images), stock(images))
    model(images).square().sum().backward()
    assert all(block.attn.spectral.w1.grad.any() for block in model.blocks)


def test_a_layer_may_have_another_source() -> None:
    layer = Cubic(C, num_heads=H)
    layer.spectral = ikattn.spectral.Mikan(H, C // H, 8)
    x = torch.randn(B, N, C)
    (layer(x).square().sum() + ikattn.regularization_loss(layer)).backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    with pytest.raises(RuntimeError, match="Mikan averages over whole sequences"):
        layer(x, is_causal=True)
