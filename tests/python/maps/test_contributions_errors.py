"""Arguments that the contribution operators and NormStats refuse, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ikattn
from agreement import assert_close
from contribution_samples import BLOCK


def wrong(**changes: Any) -> dict[str, Any]:
    return BLOCK.arguments() | changes


def stats(weight: int = 20, shape: tuple[int, ...] = (2, 7)) -> ikattn.maps.NormStats:
    return ikattn.maps.NormStats(torch.ones(weight), torch.ones(shape))


def table(text: str, error: type[Exception]) -> list[tuple[dict[str, Any], type, str]]:
    """Lines of an argument, its wrong shape, and the message."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return [
        (wrong(**{name: torch.rand([int(x) for x in shape.split()])}), error, message)
        for name, shape, message in rows
    ]


MISTAKES = [
    *table(
        r"""
        attn_weights    | 4 7 7   | attn_weights must have shape \[B, H, L, S\], got \[4, 7, 7\]
        attn_weights    | 2 4 7 6 | attn_weights .* S = 7 .*got \[2, 4, 7, 6\]
        attn_weights    | 2 6 7 7 | the heads of value must divide those of the weights, 6, got 4
        value           | 2 7 20  | value must have shape \[B, G, S, d_v\], got \[2, 7, 20\]
        out_proj_weight | 20 19   | out_proj_weight must have shape .* H d_v = 4 x 5, got \[20, 19\]
        residual        | 2 7 19  | residual must have shape .* = \[2, 7, 20\], got \[2, 7, 19\]
        """,
        RuntimeError,
    ),
    *((wrong(**change), RuntimeError, message) for change, message in (
        ({"residual": None}, r"residual must be given with norm"),
        ({"norm": None}, r"norm must be given with second_norm"),
        ({"norm": stats(weight=3)}, r"norm weight must have shape \[D\] = \[20\], got \[3\]"),
        ({"norm": stats(shape=(2, 6))}, r"norm scale must have shape .* = \[2, 7\], got \[2, 6\]"),
        ({"query_padding": torch.zeros(2, 6).bool()}, r"query_padding must .*, got \[2, 6\]"),
        ({"diagonal": 1}, r"every query among the keys: .*diagonal 1, L 7, S 7"),
        ({"diagonal": -1}, r"every query among the keys: .*diagonal -1"),
        ({"diagonal": 2**63 - 1}, r"got diagonal 9223372036854775807, L 7, S 7"),
        ({"value": torch.rand(2, 4, 7, 5, device="meta")}, r"must be on the device of value, meta"),
        ({"attn_weights": torch.rand(2, 4, 7, 7).to_sparse()}, r"must be a dense .strided. tensor"),
    )),
    *((wrong(**change), TypeError, message) for change, message in (
        ({"attn_weights": torch.ones(2, 4, 7, 7).int()}, r"attn_weights must be float64.*got Int"),
        ({"key_padding": torch.zeros(2, 7)}, r"key_padding must be bool .*, got Float"),
        ({"norm": torch.nn.LayerNorm(20)}, r"norm must be NormStats, .*got LayerNorm"),
    )),
    *((wrong(**change), ValueError, message) for change, message in (
        ({"maps": "sumed"}, r"maps must be among value_norms, .*got 'sumed'"),
        ({"maps": ["sumed"]}, r"maps must be among value_norms, .*got 'sumed'"),
        (
            {"residual": None, "norm": None, "second_norm": None, "maps": ["with_residual"]},
            r"residual must be given for the map 'with_residual'",
        ),
        ({"second_norm": None, "maps": ["encoder"]}, r"second_norm must be given for the map 'enc"),
    )),
]  # fmt: skip


@pytest.mark.parametrize("where", ["cpu", "inference", "meta"])
@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES)
def test_errors_name_the_argument(call, kind, message, where):
    """Tries the meta device too, where a fake kernel runs, as for torch.compile."""
    if where == "meta" and ("device" in message or "dense" in message):
        pytest.skip("the message is of the device, or of memory")

    def there(x: Any) -> Any:
        if isinstance(x, ikattn.maps.NormStats):
            return ikattn.maps.NormStats(there(x.weight), there(x.scale), x.centered)
        return x.to("meta") if isinstance(x, torch.Tensor) and where == "meta" else x

    with (
        torch.inference_mode(where == "inference"),
        pytest.raises(kind, match=f"contributions: .*{message}|contributions: {message}"),
    ):
        ikattn.contributions(**{name: there(x) for name, x in call.items()})


@pytest.mark.parametrize("way", ["vmap", "grad", "jvp"])
def test_errors_name_the_argument_under_transformations(way: str) -> None:
    call = BLOCK.arguments(torch.float32)
    value, others = call.pop("value"), call | {"out_proj_weight": torch.rand(20, 19)}

    def summed(x: torch.Tensor) -> torch.Tensor:
        return ikattn.contributions(value=x, **others).summed

    transformed = {
        "vmap": lambda: torch.func.vmap(summed)(torch.stack([value, value])),
        "grad": lambda: torch.func.grad(lambda x: summed(x).sum())(value),
        "jvp": lambda: torch.func.jvp(summed, (value,), (value,)),
    }
    with pytest.raises(RuntimeError, match=r"contributions: out_proj_weight must have shape"):
        transformed[way]()


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Linear(4, 4),
        torch.nn.LayerNorm((3, 8)),
        torch.nn.LayerNorm(9),
        torch.nn.LayerNorm((3, 8), elementwise_affine=False),
        torch.nn.LayerNorm(9, elementwise_affine=False),
        torch.nn.GroupNorm(2, 8),
        torch.nn.BatchNorm1d(8),
    ],
    ids=str,
)
def test_norm_stats_refuse_what_is_no_norm_of_the_last_axis(module: torch.nn.Module) -> None:
    for x in (torch.randn(2, 3, 8), torch.randn(2, 8, 8)):
        with pytest.raises(TypeError, match=r"NormStats\.of: module must be a LayerNorm or RMSNor"):
            ikattn.maps.NormStats.of(module, x)


def test_norm_stats_of_half_precision_take_the_eps_that_torch_takes() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        norm = torch.nn.RMSNorm(8).to(dtype)
        x = (0.01 * torch.randn(2, 5, 8)).to(dtype)
        linear = x.float() / ikattn.maps.NormStats.of(norm, x).scale[..., None]
        assert_close(linear, norm(x).float(), torch.finfo(dtype).eps)


class OffsetNorm(torch.nn.Module):
    """A norm like Gemma's, which multiplies by one more than the weight; centered or not."""

    def __init__(self, centered: bool, offset: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(0.3 * torch.randn(8, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.eps, self.centered, self.offset = 1e-6, centered, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x - x.mean(-1, keepdim=True) if self.centered else x
        y = y / (y.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return y * (self.weight + self.offset) + self.bias


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["offset 0", "offset 1", "torch"])
def test_norm_stats_see_how_a_norm_acts(centered: bool, kind: str) -> None:
    torch.manual_seed(0)
    of_torch = torch.nn.LayerNorm(8) if centered else torch.nn.RMSNorm(8)
    norm = of_torch.double() if kind == "torch" else OffsetNorm(centered, int(kind[-1]))
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    found = ikattn.maps.NormStats.of(norm, x)
    assert found.centered == centered
    y = x - x.mean(-1, keepdim=True) if centered else x
    bias = getattr(norm, "bias", 0.0)
    assert_close(y * found.weight / found.scale[..., None] + bias, norm(x), 1e-14)


def test_the_backward_refuses_gradients_of_other_maps() -> None:
    weights, value = torch.rand(2, 4, 6, 6), torch.randn(2, 4, 6, 3)
    inputs = [weights, *[None] * 6, value, torch.randn(12, 12), *[None] * 7]
    options = (2.0, False, False, 1e-5, None, None, True, True, 0)
    backward = torch.ops.ikattn.contribution_maps_backward

    def call(gradient: torch.Tensor, wanted: int = 0) -> None:
        maps = [None, gradient, *[None] * 4]
        chosen = [index == wanted for index in range(14)]
        backward(maps, inputs, *options, [index == 1 for index in range(6)], chosen)

    call(torch.ones(2, 6, 6))
    for sizes in ((2, 6, 3), (1, 6, 6), (2, 7, 6), (2, 6, 9)):
        with pytest.raises(RuntimeError, match="grad_maps must be Float of shape"):
            call(torch.ones(sizes))
    with pytest.raises(RuntimeError, match="the gradient of input 1 is wanted"):
        call(torch.ones(2, 6, 6), wanted=1)


def test_a_norm_whose_weight_is_offloaded_is_named() -> None:
    with pytest.raises(TypeError, match="weight of a LayerNorm is offloaded"):
        ikattn.maps.NormStats.of(torch.nn.LayerNorm(4, device="meta"), torch.randn(1, 2, 4))
