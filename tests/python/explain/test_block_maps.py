"""Maps of blocks with their feed-forward part, against the explicit vectors of every pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ikattn.explain import block_maps, decomposed_norms
from recorded_models import through_norm
from tiny_transformers import build_tiny, tiny_inputs


def encoder(*, norm_first: bool) -> nn.TransformerEncoder:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, batch_first=True, activation="gelu", norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases are not zero
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def attended(layer: nn.TransformerEncoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors of pairs with the residual, [B, L, S, D], and their sum with the bias."""
    given = layer.norm1(x) if layer.norm_first else x
    own = layer.self_attn
    packed = F.linear(given, own.in_proj_weight, own.in_proj_bias)
    query, key, value = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in packed.chunk(3, -1))
    weights = (query @ key.mT / 8**0.5).softmax(-1)
    heads = own.out_proj.weight.unflatten(1, (2, 8))
    y = torch.einsum("bhts,bhsd,ehd->btse", weights, value, heads)
    y = y + torch.eye(x.size(1), dtype=x.dtype)[None, :, :, None] * x[:, :, None]
    return y, y.sum(2) + own.out_proj.bias


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("sources", [2, 32])
def test_maps_are_the_norms_of_the_vectors_of_every_pair(norm_first: bool, sources: int) -> None:
    model, x = encoder(norm_first=norm_first), torch.randn(2, 5, 16, dtype=torch.float64)
    whole = block_maps(model, {"src": x}, sources=sources)
    parts = block_maps(model, {"src": x}, "feed_forward", sources=sources)
    with torch.no_grad():
        for n, layer in enumerate(model.layers):
            y, total = attended(layer, x)
            norm = layer.norm2 if norm_first else layer.norm1
            z = through_norm(y, norm, total)
            hidden = layer.linear1(norm(total))
            slope = F.gelu(hidden) / hidden
            f = (z @ layer.linear1.weight.mT * slope[:, :, None]) @ layer.linear2.weight.mT
            torch.testing.assert_close(parts[n], f.norm(dim=-1))
            made = y + f
            if not norm_first:
                total = norm(total) + layer.linear2(F.gelu(hidden))
                made = through_norm(z + f, layer.norm2, total)
            torch.testing.assert_close(whole[n], made.norm(dim=-1))
            x = layer(x)


# The module that makes what is added to the residual; of a parallel block, both that do.
PARTS = {
    "cohere": ("mlp", "self_attn.o_proj"),
    "bert": ("output.dense",),
    "gpt2": ("mlp",),
    "llama": ("mlp",),
    "gemma2": ("post_feedforward_layernorm",),
    "falcon": ("mlp", "self_attention.dense"),
}


@pytest.mark.parametrize("kind", PARTS)
def test_the_part_of_an_only_token_is_what_the_feed_forward_module_makes(kind: str) -> None:
    model = build_tiny(kind).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    made: dict[nn.Module, Tensor] = {}
    blocks = next(x for x in model.modules() if isinstance(x, nn.ModuleList))
    for module in (block.get_submodule(path) for block in blocks for path in PARTS[kind]):
        module.register_forward_hook(lambda own, args, output: made.update({own: output.clone()}))
    inputs = {"input_ids": tiny_inputs(model)["input_ids"][:1, :1]}
    found = block_maps(model, inputs, "feed_forward").flatten()
    with torch.no_grad():
        model(**inputs)
    expected = [
        sum(made[block.get_submodule(path)] for path in PARTS[kind]).norm() for block in blocks
    ]
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_bias_of_the_values_belongs_to_its_token_however_many_go_together() -> None:
    model, x = encoder(norm_first=False), torch.randn(1, 5, 16, dtype=torch.float64)
    whole = decomposed_norms(model, {"src": x}, sources=5)
    for sources in (1, 2, 3):
        torch.testing.assert_close(decomposed_norms(model, {"src": x}, sources=sources), whole)


def test_what_is_no_block_with_a_feed_forward_part_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + self.attention(x, x, x)[0])

    model, x = Model().eval(), torch.randn(1, 4, 8)
    assert block_maps(model, {"x": x}).shape == (1, 1, 4, 4)
    with pytest.raises(NotImplementedError, match="does not end with the sum of a feed-forward"):
        block_maps(model, {"x": x}, "feed_forward")
    with pytest.raises(ValueError, match='scope must be "block" or'):
        block_maps(model, {"x": x}, "ff")
