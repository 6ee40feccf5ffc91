"""What the contribution operators and NormStats refuse, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ikattn
from agreement import assert_close
from contribution_samples import (
    BLOCK,
)


def wrong(**changes: Any) -> dict[str, Any]:
    return BLOCK.arguments() | changes


def stats(weight: int = 20, shape: tuple[int, ...] = (2, 7)) -> ikattn.NormStats:
    return ikattn.NormStats(torch.ones(weight), torch.ones(shape))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            wrong(attn_weights=torch.rand(4, 7, 7)),
            RuntimeError,
            r"attn_weights must have shape \[B, H, T, S\], got \[4, 7, 7\]",
        ),
        (
            wrong(attn_weights=torch.rand(2, 4, 7, 6)),
            RuntimeError,
            r"attn_weights .* S = 7 .*got \[2, 4, 7, 6\]",
        ),
        (
            wrong(attn_weights=torch.ones(2, 4, 7, 7).int()),
            TypeError,
            r"attn_weights must be float64.*got Int",
        ),
        (
            wrong(attn_weights=torch.rand(2, 6, 7, 7)),
            RuntimeError,
            r"the heads of value must divide those of the weights, 6, got 4",
        ),
        (
            wrong(value=torch.rand(2, 7, 20)),
            RuntimeError,
            r"value must have shape \[B, G, S, d_v\], got \[2, 7, 20\]",
        ),
        (
            wrong(out_proj_weight=torch.rand(20, 19)),
            RuntimeError,
            r"out_proj_weight must have shape \[D, H d_v\] with H d_v = 4 x 5, got \[20, 19\]",
        ),
        (
            wrong(residual=torch.rand(2, 7, 19)),
            RuntimeError,
            r"residual must have shape \[B, T, D\] = \[2, 7, 20\], got \[2, 7, 19\]",
        ),
        (wrong(residual=None), RuntimeError, r"residual must be given with norm"),
        (wrong(norm=None), RuntimeError, r"norm must be given with second_norm"),
        (
            wrong(norm=stats(weight=3)),
            RuntimeError,
            r"norm weight must have shape \[D\] = \[20\], got \[3\]",
        ),
        (
            wrong(norm=stats(shape=(2, 6))),
            RuntimeError,
            r"norm scale must have shape \[B, T\] = \[2, 7\], got \[2, 6\]",
        ),
        (
            wrong(key_padding=torch.zeros(2, 7)),
            TypeError,
            r"key_padding must be bool \(true = padding\), got Float",
        ),
        (
            wrong(query_padding=torch.zeros(2, 6).bool()),
            RuntimeError,
            r"query_padding must have shape \[B, T\] = \[2, 7\], got \[2, 6\]",
        ),
        (wrong(diagonal=1), RuntimeError, r"every query among the keys: .*diagonal 1, T 7, S 7"),
        (wrong(diagonal=-1), RuntimeError, r"every query among the keys: .*diagonal -1"),
        (
            wrong(value=torch.rand(2, 4, 7, 5, device="meta")),
            RuntimeError,
            r"attn_weights must be on the device of value, meta, got cpu",
        ),
        (
            wrong(attn_weights=torch.rand(2, 4, 7, 7).to_sparse()),
            RuntimeError,
            r"attn_weights must be a dense \(strided\) tensor",
        ),
        (wrong(maps=["sumed"]), ValueError, r"maps must be among value_norms, .*got 'sumed'"),
        (
            wrong(residual=None, norm=None, second_norm=None, maps=["with_residual"]),
            ValueError,
            r"residual must be given for the map 'with_residual'",
        ),
        (
            wrong(second_norm=None, maps=["encoder"]),
            ValueError,
            r"second_norm must be given for the map 'encoder'",
        ),
    ],
)
def test_errors_name_the_argument(call: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=f"contributions: .*{message}|contributions: {message}"):
        ikattn.contributions(**call)


@pytest.mark.parametrize(
    "module",
    [torch.nn.Linear(4, 4), torch.nn.LayerNorm((3, 8)), torch.nn.LayerNorm(9)],
    ids=["linear", "two axes", "other size"],
)
def test_norm_stats_refuse_what_is_no_norm_of_the_last_axis(module: torch.nn.Module) -> None:
    with pytest.raises(TypeError, match=r"NormStats\.of: module must be a LayerNorm or RMSNorm"):
        ikattn.NormStats.of(module, torch.randn(2, 3, 8))


@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_norm_stats_make_the_norm_linear(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(6)
    norm = kind(8).double()
    torch.nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    stats_ = ikattn.NormStats.of(norm, x)
    y = x - x.mean(-1, keepdim=True) if stats_.centered else x
    y = y * stats_.weight / stats_.scale[..., None]
    assert_close(y, norm(x), 1e-14)
