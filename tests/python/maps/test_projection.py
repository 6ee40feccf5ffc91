"""ikattn.maps.projection and the map of a recording, against explicit vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ikattn
from ikattn.maps import NormStats, projection

B, H, G, L, S, d_v, D = 2, 4, 2, 5, 7, 3, 10


def given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    weights = torch.rand(B, H, L, S, dtype=torch.float64).softmax(-1)
    weights[0, 1, 2, 3:] = 0
    value = torch.randn(B, G, S, d_v, dtype=torch.float64)
    return weights, value, torch.randn(D, H * d_v, dtype=torch.float64)


def vectors_of(weights: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """Every vector, [B, H, L, S, D]."""
    heads = value.repeat_interleave(weights.size(1) // value.size(1), 1)
    by_head = out.unflatten(1, (weights.size(1), -1))
    return torch.einsum("bhls,bhsd,ehd->bhlse", weights, heads, by_head)


def parts_of(vectors: Tensor, output: Tensor) -> Tensor:
    size = output.square().sum(-1)[:, None, :, None]
    return torch.einsum("bhlse,ble->bhls", vectors, output) / size


def test_parts_are_those_of_explicit_vectors_and_add_up_to_one() -> None:
    vectors = vectors_of(*given())
    found = projection(*given())
    torch.testing.assert_close(
        found, parts_of(vectors, vectors.sum((1, 3))), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(found.sum((1, 3)), torch.ones(B, L).double(), rtol=1e-12, atol=1e-12)
    in_half = projection(*(x.bfloat16() for x in given()))
    assert in_half.dtype == torch.float32
    torch.testing.assert_close(in_half.sum((1, 3)), torch.ones(B, L), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, d_v])
def test_a_gate_multiplies_heads_before_the_out_projection(size: int) -> None:
    weights, value, out = given()
    gate = torch.randn(B, H, L, size, dtype=torch.float64)
    gated = gate.unsqueeze(3) * value.repeat_interleave(H // G, 1).unsqueeze(2)  # [B, H, L, S, d_v]
    by_head = out.unflatten(1, (H, -1))
    vectors = torch.einsum("bhls,bhlsd,ehd->bhlse", weights, gated, by_head)
    found = projection(weights, value, out, gate=gate)
    expected = parts_of(vectors, vectors.sum((1, 3)))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match=r"gate must be \[2, 4, 5, 3\], or 1 .*got \[2, 4, 5\]"):
        projection(weights, value, out, gate=gate[..., 0])


@pytest.mark.parametrize("norm", [nn.LayerNorm(D), nn.RMSNorm(D)], ids=["LayerNorm", "RMSNorm"])
def test_the_residual_has_what_rows_lack(norm: nn.Module) -> None:
    nn.init.normal_(norm.double().weight)  # type: ignore[arg-type]
    vectors, residual = vectors_of(*given()), torch.randn(B, L, D, dtype=torch.float64)
    total = vectors.sum((1, 3)) + residual
    stats = NormStats.of(norm, total)

    def through(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
        return x * norm.weight.detach()  # type: ignore[operator, union-attr]

    for options, f in (({}, lambda x: x), ({"norm": stats}, through)):
        output = f(total)
        found = projection(*given(), residual=residual, **options)
        torch.testing.assert_close(found, parts_of(f(vectors), output), rtol=1e-11, atol=1e-12)
        rest = (f(residual) * output).sum(-1) / output.square().sum(-1)
        torch.testing.assert_close(1 - found.sum((1, 3)), rest, rtol=1e-11, atol=1e-12)


def test_what_nobody_sees_does_not_show_and_nothing_is_divided_by_zero() -> None:
    weights, value, out = given()
    expected = projection(weights * (torch.arange(S) != 6), value, out)
    value[:, :, 6] = torch.nan
    key_padding = (torch.arange(S) == 6).expand(B, S)
    query_padding = (torch.arange(L) == 0).expand(B, L)
    found = projection(weights, value, out, key_padding=key_padding, query_padding=query_padding)
    torch.testing.assert_close(found[:, :, 1:], expected[:, :, 1:])
    assert not found[:, :, 0].any()
    residual = torch.full((B, L, D), torch.nan, dtype=torch.float64)
    everywhere = torch.ones(B, L, dtype=torch.bool)
    assert not projection(*given(), residual=residual, query_padding=everywhere).any()
    weights[:, :, 1:, 6] = 0
    found = projection(weights, value, out)
    assert found[:, :, 0].isnan().any()
    torch.testing.assert_close(found[:, :, 1:], expected[:, :, 1:])
    weights = given()[0]
    assert not projection(weights, torch.zeros_like(value), out).any()
    tiny = projection(weights, 1e-200 * given()[1], out)
    torch.testing.assert_close(tiny, projection(*given()), rtol=1e-10, atol=1e-12)
    weights.requires_grad_()
    assert torch.autograd.gradcheck(projection, (weights, given()[1], out))
    with pytest.raises(ValueError, match=r"projection: value must be \[2, G, 7, d_v\]"):
        projection(weights, value[:, :, 1:], out)


@pytest.mark.parametrize("kernel", ["dot", "implicit"])
def test_a_recording_has_the_parts_of_each_head(kernel: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    if kernel == "implicit":
        ikattn.convert(model, num_frequencies=8)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.no_grad(), ikattn.record(model, maps=("all",)) as recording:
        model(x, src_key_padding_mask=padding)
    maps = recording[0]
    assert maps.projection is not None
    sums = maps.projection.sum((1, 3))
    torch.testing.assert_close(sums, (~padding).double(), rtol=1e-12, atol=1e-12)
    # The parts of a head, and the norm that it moves, are of the same vectors.
    assert ((maps.projection != 0) == (maps.per_head != 0)).all()
    recording.save(tmp_path / "maps.npz")
    loaded = ikattn.load_maps(tmp_path / "maps.npz")
    torch.testing.assert_close(loaded[0].projection, maps.projection)
    recording.plot(tmp_path / "a.png", layer=0, map="projection")
    with torch.no_grad(), ikattn.record(model, maps=("projection",), reduce="columns") as reduced:
        model(x, src_key_padding_mask=padding)
    columns = reduced[0].reduced["projection"]
    torch.testing.assert_close(columns, maps.projection.sum(-2))
    with pytest.raises(ValueError, match="has numbers below 0"):
        ikattn.rollout(recording, map="projection", residual=0.5)
