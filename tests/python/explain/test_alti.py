"""ALTI against its definition, alone and through recordings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from ikattn.explain import alti_plus
from ikattn.maps import NormStats, alti
from ikattn.maps import mixing as _alti
from ikattn.recorder import record
from recorded_models import recorded

B, H, G, L, S, D_V, D = 2, 4, 2, 5, 6, 3, 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def arguments(diagonal: int = 1, **norms: NormStats | None) -> dict[str, Any]:
    hidden = torch.ones(L, S, dtype=torch.bool).triu(diagonal + 1)
    weights = normal(B, H, L, S).masked_fill(hidden, -math.inf).softmax(-1)
    given: dict[str, Any] = {
        "attn_weights": weights,
        "value": normal(B, G, S, D_V),
        "out_proj_weight": normal(D, H * D_V),
        "residual": normal(B, L, D, seed=1),
        "diagonal": diagonal,
        **norms,
    }
    biases = 0.3 * normal(B, L, D, seed=2)
    return given | {"output": vectors(given).sum(2) + biases}


def through(x: Tensor, stats: NormStats) -> Tensor:
    """x: [B, L, .., D]."""
    x = x - x.mean(-1, keepdim=True) if stats.centered else x
    scale = stats.scale.view(B, L, *[1] * (x.dim() - 2))
    return x * stats.weight / scale


def vectors(given: dict[str, Any]) -> Tensor:
    """Returns the vector from each token, [B, L, S, D]."""
    value = given["value"].repeat_interleave(H // G, 1)
    by_head = given["out_proj_weight"].unflatten(1, (H, D_V))
    found = torch.einsum("bhts,bhsv,dhv->btsd", given["attn_weights"], value, by_head)
    if given.get("output_norm"):
        found = through(found, given["output_norm"])
    for i in range(L):
        found[:, i, i + given["diagonal"]] += given["residual"][:, i]
    return through(found, given["norm"]) if given.get("norm") else found


def definition(given: dict[str, Any], order: int = 1) -> Tensor:
    y = given["output"]
    off = torch.linalg.vector_norm(y.unsqueeze(2) - vectors(given), order, -1)
    nearer = (torch.linalg.vector_norm(y, order, -1).unsqueeze(-1) - off).clamp_min(0)
    nearer = nearer.masked_fill(given["attn_weights"].sum(1) == 0, 0)
    return nearer / nearer.sum(-1, keepdim=True).clamp_min(1e-300)


NORMS = {
    "layer norm": NormStats(normal(D), 1 + normal(B, L).abs(), True),
    "rms norm": NormStats(normal(D), 1 + normal(B, L).abs(), False),
}


@pytest.mark.parametrize("norm", [None, *NORMS])
@pytest.mark.parametrize("output_norm", [None, "rms norm"])
@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_alti_is_its_definition(norm, output_norm, distance, monkeypatch):
    norms = {"norm": norm and NORMS[norm], "output_norm": output_norm and NORMS[output_norm]}
    given = arguments(**norms)
    expected = definition(given, 1 if distance == "l1" else 2)
    assert ((expected > 0.05) & (expected < 0.95)).sum() > B * L
    found = alti(**given, distance=distance)
    torch.testing.assert_close(found, expected)
    monkeypatch.setattr(_alti, "_has_kernel", lambda tensors: False)
    torch.testing.assert_close(alti(**given, distance=distance), expected)
    monkeypatch.setattr(_alti, "MOST_ELEMENTS", 1)  # a key at a time
    torch.testing.assert_close(alti(**given, distance=distance), expected)


@pytest.mark.operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 16, 33, 100])
@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_rows_of_any_size(size: int, distance: Any, dtype: torch.dtype) -> None:
    """Sizes of more queries than a task of the kernel takes, with every remainder of rows."""
    queries, keys, heads = 67, 70, 5
    given = {
        "attn_weights": normal(1, heads, queries, keys).softmax(-1),
        "value": normal(1, heads, keys, D_V),
        "out_proj_weight": normal(size, heads * D_V),
        "output": normal(1, queries, size),
        "residual": normal(1, queries, size, seed=1),
    }
    given = {name: x.to(dtype) for name, x in given.items()}
    found = alti(**given, distance=distance, diagonal=3)  # type: ignore[arg-type]
    wide = {name: x.double().requires_grad_() for name, x in given.items()}  # composed
    expected = alti(**wide, distance=distance, diagonal=3).detach()  # type: ignore[arg-type]
    assert expected.any()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.usefixtures("threads")
def test_bits_do_not_depend_on_threads() -> None:
    given = {name: x.float() if isinstance(x, Tensor) else x for name, x in arguments().items()}
    torch.set_num_threads(1)
    expected = alti(**given)
    torch.set_num_threads(3)
    assert torch.equal(alti(**given), expected)


def test_half_precision_and_padding() -> None:
    given = arguments()
    half = {name: x.half() if isinstance(x, Tensor) else x for name, x in given.items()}
    padding = {
        "query_padding": torch.arange(L) >= torch.tensor([[5], [3]]),
        "key_padding": torch.arange(S) >= torch.tensor([[6], [4]]),
    }
    half["value"][1, :, 4:] = math.nan
    half["attn_weights"][1, :, :, 4:] = 0
    found = alti(**half, **padding)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert not found[1, 3:].any()
    assert not found[1, :, 4:].any()
    torch.testing.assert_close(found[0], definition(given)[0].float(), atol=2e-3, rtol=0)


def test_gradients_reach_what_the_map_is_made_of() -> None:
    given = arguments()
    names = ("attn_weights", "value", "out_proj_weight", "output", "residual")
    tensors = [given[name].clone().requires_grad_() for name in names]
    found = alti(**given | dict(zip(names, tensors, strict=True)))
    for gradient in torch.autograd.grad(found.square().sum(), tensors):
        assert gradient.isfinite().all()
        assert gradient.any()


def test_bad_arguments_are_named() -> None:
    given = arguments()
    for name, value, said in (
        ("distance", "l3", 'distance must be "l1" or "l2", got \'l3\''),
        ("value", normal(B, 3, S, D_V), "value must be"),
        ("attn_weights", normal(L, S), "attn_weights must be"),
        ("out_proj_weight", normal(D, 7), "out_proj_weight must be"),
        ("residual", normal(B, L, 7), "residual must be"),
        ("output", normal(B, S, D), "output must be"),
    ):
        with pytest.raises(ValueError, match=f"alti: {said}"):
            alti(**given | {name: value})


@pytest.mark.parametrize("norm_first", [False, True])
def test_recorded_blocks(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        D, H, 24, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    ).eval()
    for parameter in layer.parameters():  # biases too
        nn.init.normal_(parameter, std=0.4)
    x = normal(B, L, D)
    with torch.no_grad():
        recording = recorded(layer, x, ("alti", "weights"))
        attended = layer.norm1(x) if norm_first else x
        made = x + layer.self_attn(attended, attended, attended, need_weights=False)[0]
    maps = recording["self_attn"]
    weight, bias = layer.self_attn.in_proj_weight[2 * D :], layer.self_attn.in_proj_bias[2 * D :]
    value = (attended @ weight.mT + bias).unflatten(-1, (H, D // H)).transpose(1, 2)
    block: dict[str, Any] = {"residual": x, "output": made}
    if not norm_first:
        block |= {"norm": NormStats.of(layer.norm1, made), "output": layer.norm1(made)}
    expected = alti(maps.weights, value, layer.self_attn.out_proj.weight, **block)
    torch.testing.assert_close(maps.alti, expected.detach())
    torch.testing.assert_close(maps.alti.sum(-1), torch.ones(B, L, dtype=torch.float64))


def test_the_operator_names_what_does_not_fit() -> None:
    weights, heads = normal(B, H, L, S), normal(B, S, H, D)
    output, residual = normal(B, L, D), normal(B, L, D)
    distances = torch.ops.ikattn.alti_distances
    assert distances(weights, heads, output, residual, 0, False).shape == (B, L, S)
    assert distances(weights[:0], heads[:0], output[:0], residual[:0], 0, True).shape == (0, L, S)
    for bad in (
        (weights.float(), heads, output, residual),
        (weights, heads[..., :1], output, residual),
        (weights[0], heads, output, residual),
        (weights.half(), heads.half(), output.half(), residual.half()),
        (weights, heads, output, residual[:, :1]),
    ):
        with pytest.raises(RuntimeError, match=r"alti_distances: .* got \["):
            distances(*bad, 0, False)


# --- Cross-attention and ALTI+


def test_without_a_diagonal_the_residual_is_a_token_of_its_own() -> None:
    given = arguments() | {"diagonal": None, "norm": NORMS["layer norm"]}
    hidden = torch.zeros(L, S, dtype=torch.bool)
    hidden[:, 2] = True
    given["attn_weights"] = given["attn_weights"].masked_fill(hidden, 0)
    residual = given["residual"]
    pairs = vectors(given | {"residual": torch.zeros_like(residual), "diagonal": 0})
    own = through(residual, given["norm"])
    y = given["output"] = pairs.sum(2) + own + 0.3 * normal(B, L, D, seed=2)
    columns = torch.cat([pairs, own.unsqueeze(2)], 2)
    off = (y.unsqueeze(2) - columns).abs().sum(-1)
    nearer = (y.abs().sum(-1, keepdim=True) - off).clamp_min(0)
    nearer[:, :, 2] = 0
    shares = nearer / nearer.sum(-1, keepdim=True)
    assert ((shares[..., -1] > 0.05) & (shares[..., -1] < 0.95)).any()
    torch.testing.assert_close(alti(**given), shares[..., :-1])


def encoder_decoder(*, norm_first: bool = False) -> nn.Transformer:
    torch.manual_seed(1)
    return nn.Transformer(16, 2, 2, 2, 32, batch_first=True, norm_first=norm_first).double().eval()


@pytest.mark.parametrize("norm_first", [False, True])
def test_alti_plus_follows_source_and_target_through_the_decoder(norm_first: bool) -> None:
    model = encoder_decoder(norm_first=norm_first)
    source, target = normal(2, 5, 16), normal(2, 3, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True]])
    masks = {
        "tgt_mask": causal,
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    with torch.no_grad(), record(model, maps=("alti",)) as recording:
        model(source, target, **masks)
    of_source, of_target = alti_plus(recording)
    maps = [each.alti for each in recording.batches[0].values()]
    assert [layer.kind for layer in recording.layers.values()] == ["self"] * 3 + [
        "cross",
        "self",
        "cross",
    ]
    encoder = maps[1] @ maps[0]
    # the whole as one matrix: vectors of the source stay, the decoder's are mixed
    whole = torch.cat([torch.zeros(2, 3, 5), torch.eye(3).expand(2, 3, 3)], 2).double()
    for own, cross in ((maps[2], maps[3]), (maps[4], maps[5])):
        left = 1 - cross.sum(-1)
        whole = torch.diag_embed(left) @ own @ whole
        whole[..., :5] += cross @ encoder
    torch.testing.assert_close(torch.cat([of_source, of_target], 2), whole)
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    assert not of_source[1, :, 4].any()
    assert not of_target.triu(1).any()
    assert 0.05 < float(of_source.sum(-1).mean()) < 0.95


def test_alti_plus_needs_an_encoder_and_a_decoder() -> None:
    model, x = encoder_decoder(), normal(2, 5, 16)
    recording = recorded(model.encoder, x, "alti")
    with pytest.raises(ValueError, match=r"self-attention of an encoder, .* got layers\.0"):
        alti_plus(recording)
    recording = recorded(model, (x, x), "summed")
    with pytest.raises(ValueError, match=r"encoder\.layers\.0\.self_attn has no map 'alti'"):
        alti_plus(recording)


def test_rollout_of_a_translation_has_shares_of_source_and_target() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tiny_transformers import build_tiny, tiny_inputs

    backbone = build_tiny("marian")
    import transformers

    model = transformers.MarianMTModel(backbone.config).double().eval()
    inputs = tiny_inputs(backbone)
    found = ikattn.attribute(model, inputs, target=slice(1, None), method="rollout:alti")
    total = found.scores.sum(-1) + found.prefix_scores.sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    with pytest.raises(ValueError, match='only "rollout:alti" goes'):
        ikattn.attribute(model, inputs, target=slice(1, None), method="rollout:encoder")
