"""Recordings of models of vision libraries, each against the explicit sum in float64."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agreement import assert_close
from recorded_models import pair_vectors, recorded
from vision_libraries import import_vision

timm = import_vision("timm")
pytestmark = pytest.mark.usefixtures("float64_by_default")

SIZE = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {**SIZE, "patch_size": 8},
    "vit_small_patch14_dinov2": {**SIZE, "img_size": 28, "init_values": 0.5},
    "vit_small_patch14_reg4_dinov2": {**SIZE, "img_size": 28, "init_values": 0.5},
    "deit_tiny_distilled_patch16_224": {**SIZE, "patch_size": 8},
    "beit_base_patch16_224": {**SIZE, "patch_size": 8},
    "eva02_tiny_patch14_224": {**SIZE, "img_size": 28},
    "vit_small_patch16_dinov3": {**SIZE, "init_values": 0.5},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3)
    },
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "cait_xxs24_224": {**SIZE, "patch_size": 8},
}  # fmt: skip


class Heard:
    """The arguments of calls of F.scaled_dot_product_attention, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []
        attend = F.scaled_dot_product_attention

        def hear(*args: Any, **kwargs: Any) -> Tensor:
            self.calls.append((weights_of(*args, **kwargs), args[2]))
            return attend(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", hear)


def weights_of(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **rest: Any
) -> Tensor:
    scores = q @ k.mT * (rest.get("scale") or 1 / math.sqrt(q.size(-1)))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    assert not rest.get("is_causal")
    return scores.softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_maps_are_the_explicit_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    timm.layers.set_fused_attn(True, experimental=True)  # Swin calls the function then alone
    model = timm.create_model(name, pretrained=False, num_classes=3, **MODELS[name]).eval()
    heard = Heard(monkeypatch)
    side = MODELS[name].get("img_size", 32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*look like attention.*")  # of CaiT, which mixes heads
        recording = recorded(model, torch.randn(2, 3, side, side), check="all")
    layers = recording.batches[0].layers
    assert len(layers) == len(heard.calls) > 0
    for (layer, maps), (weights, value) in zip(layers.items(), heard.calls, strict=True):
        projection = model.get_submodule(layer).proj.weight
        norms = pair_vectors(weights, value, projection).norm(dim=-1)
        assert_close(maps.summed, norms, 1e-10, f"summed of {layer}")
        is_cross = weights.size(-2) != weights.size(-1)  # fewer keys in PVT, one query in CaiT
        assert recording.layers[layer].kind == ("cross" if is_cross else "self")
        has_windows = weights.size(0) > 2  # whose tokens have another order than the block's
        assert (maps.with_residual is None) == (is_cross or has_windows)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("vit_tiny_patch16_224", lambda block: 1.0),
        ("vit_small_patch14_dinov2", lambda block: block.ls1.gamma),
        ("vit_small_patch16_dinov3", lambda block: block.gamma_1),
    ],
)
def test_maps_with_the_residual(name, scale, monkeypatch):
    torch.manual_seed(1)
    model = timm.create_model(name, pretrained=False, num_classes=3, **MODELS[name]).eval()
    heard, given = Heard(monkeypatch), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    side = MODELS[name]["img_size"]
    recording = recorded(model, torch.randn(2, 3, side, side), "with_residual")
    for number, block in enumerate(model.blocks):
        y = pair_vectors(*heard.calls[number], block.attn.proj.weight) * scale(block)
        own = torch.arange(y.size(1))
        y[:, own, own] += given[number]
        assert_close(recording[f"blocks.{number}.attn"].with_residual, y.norm(dim=-1), 1e-8)


@torch.no_grad()
def test_attention_that_is_told_to_compute_its_own_weights_has_the_same_maps() -> None:
    name, x = "swin_tiny_patch4_window7_224", torch.randn(1, 3, 56, 56)
    found = []
    for is_fused in (True, False):
        torch.manual_seed(1)
        timm.layers.set_fused_attn(is_fused, experimental=is_fused)
        model = timm.create_model(name, pretrained=False, **MODELS[name]).eval()
        found.append(recorded(model, x, "summed"))
    assert found[0].names == found[1].names
    for layer in found[0].names:
        assert_close(found[1][layer].summed, found[0][layer].summed, 1e-8)


@torch.no_grad()
def test_diffusers_attention_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    diffusers: Any = import_vision("diffusers")
    model: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=20,
        attention_head_dim=8,
    ).eval()
    heard = Heard(monkeypatch)
    recording = recorded(model, (torch.randn(1, 4, 8, 8), torch.tensor(1), torch.randn(1, 7, 20)))
    assert len(recording.layers) == len(heard.calls) == 8
    for (layer, maps), call in zip(recording.batches[0].layers.items(), heard.calls, strict=True):
        projection = model.get_submodule(layer).to_out[0].weight
        assert_close(maps.summed, pair_vectors(*call, projection).norm(dim=-1), 1e-10, layer)
        is_cross = layer.endswith("attn2")
        assert recording.layers[layer].kind == ("cross" if is_cross else "self")


def torchvision_vit() -> tuple[nn.Module, list[Any], tuple[Tensor, ...]]:
    vision: Any = import_vision("torchvision.models.vision_transformer")
    model = vision.VisionTransformer(32, 8, 2, 3, 24, 48).eval()
    return model, list(model.encoder.layers), (torch.randn(2, 3, 32, 32),)


def open_clip_clip() -> tuple[nn.Module, list[Any], tuple[Tensor, ...]]:
    clip: Any = import_vision("open_clip").model
    seen = clip.CLIPVisionCfg(layers=2, width=64, image_size=32, patch_size=16, ls_init_value=0.5)
    read = clip.CLIPTextCfg(context_length=5, vocab_size=100, width=32, heads=2, layers=2)
    model = clip.CLIP(embed_dim=32, vision_cfg=seen, text_cfg=read).eval()
    blocks = [*model.visual.transformer.resblocks, *model.transformer.resblocks]
    return model, blocks, (torch.randn(5, 3, 32, 32), torch.randint(1, 99, (5, 5)))


@torch.no_grad()
@pytest.mark.parametrize("make", [torchvision_vit, open_clip_clip])
def test_maps_around_torchs_attention(make: Any) -> None:
    torch.manual_seed(1)
    model, blocks, inputs = make()
    given: list[Tensor] = []  # of each block what its norms and its attention were given, in turn
    masks: list[Tensor | None] = []
    for block in blocks:
        attention = next(part for part in block.modules() if type(part) is nn.MultiheadAttention)
        attention.in_proj_bias.normal_()
        attention.register_forward_pre_hook(
            lambda module, args, options: masks.append(options.get("attn_mask")), with_kwargs=True
        )
        for part in (block.ln_1, attention, block.ln_2):
            part.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    recording = recorded(model, inputs, check="all")
    for number, (block, maps) in enumerate(
        zip(blocks, recording.batches[0].layers.values(), strict=True)
    ):
        attention = next(part for part in block.modules() if type(part) is nn.MultiheadAttention)
        x, read, total = given[3 * number : 3 * number + 3]
        projected = F.linear(read, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (attention.num_heads, -1)) for part in projected)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = pair_vectors(weights_of(q, k, v, masks[number]), v, attention.out_proj.weight)
        assert_close(maps.summed, y.norm(dim=-1), 1e-10)
        y = y * getattr(getattr(block, "ls_1", None), "gamma", 1.0)
        own = torch.arange(y.size(1))
        y[:, own, own] += x
        assert_close(maps.with_residual, y.norm(dim=-1), 1e-8)
        scale = (total.var(-1, correction=0) + block.ln_2.eps).sqrt()[..., None, None]
        y = (y - y.mean(-1, keepdim=True)) * block.ln_2.weight / scale
        assert_close(maps.encoder, y.norm(dim=-1), 1e-8)
