"""Contribution maps on a GPU, against their definition and the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, error
from contribution_samples import SAMPLES, Sample, definition, differentiable, named, replaced
from gpu import DEVICE, on_gpu, turn
from samples import name_of


@pytest.fixture(autouse=True)
def streamed_maps_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the ledger says; maps in blocks of rows are what they are compared with."""
    turn(monkeypatch, "+streamed_maps")


every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)


@every_sample
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
def test_maps_are_those_of_the_definition(sample: Sample, dtype: torch.dtype) -> None:
    arguments: dict[str, Any] = sample.arguments(dtype)
    got = named(ikattn.contributions(**on_gpu(arguments), per_head=True))
    expected = named(definition(arguments))
    assert got.keys() == expected.keys()
    for name, map_ in got.items():
        assert_close(map_.cpu(), expected[name], 1e-13 if dtype == torch.float64 else 2e-6, name)


@pytest.mark.parametrize(("heads", "columns"), [(2, 0), (3, 1), (2, 17)])
def test_value_heads_of_any_width(heads: int, columns: int) -> None:
    torch.manual_seed(0)
    weights, value = torch.rand(2, heads, 4, 5), torch.randn(2, heads, 5, columns)
    weight = torch.randn(9, heads * columns)
    got = named(ikattn.contributions(*(x.to(DEVICE) for x in (weights, value, weight))))
    expected = named(ikattn.contributions(weights, value, weight))
    for name, map_ in got.items():
        assert_close(map_.cpu(), expected[name], 2e-6, name)


@pytest.mark.parametrize("largest", ["value", "projection"])
def test_the_largest_numbers_keep_their_maps(largest: str) -> None:
    most, least = torch.finfo(torch.float32).max, 1e-20
    value = torch.full((1, 1, 1, 16), most if largest == "value" else least)
    weight = torch.full((4, 16), least if largest == "value" else most)
    maps = ikattn.contributions(*(x.to(DEVICE) for x in (torch.ones(1, 1, 1, 1), value, weight)))
    expected = (value.double()[0, 0] @ weight.double().mT).norm(dim=-1).float()
    assert_close(maps.summed.cpu()[0], expected.unsqueeze(0), 1e-6)


@every_sample
def test_gradients_are_those_of_the_cpu(sample: Sample) -> None:
    def gradients(arguments: dict[str, Any]) -> list[Tensor]:
        leaves = {
            name: x.detach().requires_grad_() for name, x in differentiable(arguments).items()
        }
        maps = named(ikattn.contributions(**replaced(arguments, leaves), per_head=True))
        incoming = [
            torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x)
            for x in maps.values()
        ]
        found = torch.autograd.grad(list(maps.values()), list(leaves.values()), incoming)
        return [x.cpu() for x in found]

    arguments = sample.arguments()
    for got, expected in zip(gradients(on_gpu(arguments)), gradients(arguments), strict=True):
        assert_close(got, expected, 1e-11)


@pytest.mark.parametrize("way", ["dot", "dot, masked", "implicit, causal", "implicit, masked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
def test_streamed_maps_and_gradients_are_those_of_the_cpu(way: str, dtype: torch.dtype) -> None:
    """All maps of a block, under padding, are differentiated."""
    torch.manual_seed(0)
    shapes = {"query": (2, 4, 37, 6), "key": (2, 2, 37, 6), "value": (2, 2, 37, 6)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {"out_proj_weight": torch.randn(24, 24) / 5, "residual": torch.randn(2, 37, 24)}
    if way.startswith("implicit"):
        tensors |= dict(zip(("w1", "w2"), torch.randn(2, 4, 6, 9) / 5, strict=True))
    if way.endswith("masked"):
        tensors |= {"attn_mask": torch.randn(4, 37, 37), "key_bias": torch.randn(2, 2, 37)}
    padding = torch.arange(37).expand(2, 37) >= torch.tensor([[37], [30]])
    layer_norm = torch.nn.LayerNorm(24).to(dtype)
    options: dict[str, Any] = {
        "is_causal": way.endswith("causal"),
        "enable_gqa": True,
        "query_padding": padding,
        "key_padding": padding,
        "norm": ikattn.maps.NormStats.of(layer_norm, torch.randn(2, 37, 24, dtype=dtype)),
    }

    def results(on_device: bool) -> list[Tensor]:
        place = on_gpu if on_device else dict
        leaves = {
            name: x.requires_grad_()
            for name, x in place({n: x.to(dtype) for n, x in tensors.items()}).items()
        }
        maps = list(named(ikattn.streamed_contributions(**leaves, **place(options))).values())
        incoming = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in maps]
        found = torch.autograd.grad(
            maps, list(leaves.values()), [x.to(maps[0].device) for x in incoming]
        )
        return [x.detach().cpu() for x in (*maps, *found)]

    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for got, expected in zip(results(True), results(False), strict=True):
        assert_close(got, expected, tolerance)


@pytest.mark.parametrize("factor", [1e35, 1e30, 1e19, 1e-30])
@pytest.mark.parametrize("heads", [2, 12, 17, 70])
def test_norms_whose_squares_leave_the_range_of_float32(heads: int, factor: float) -> None:
    torch.manual_seed(0)
    weights, value = torch.rand(1, heads, 21, 70), factor * torch.randn(1, heads, 70, 3)
    value[..., 3, :] /= factor  # one key of ordinary size among them
    tensors = weights, value, torch.randn(8, 3 * heads), factor * torch.randn(1, 21, 8)
    *call, residual = (x.to(DEVICE) for x in tensors)
    maps = ["value_norms"] if factor < 1 else None  # below, squares of sums vanish
    found = ikattn.contributions(*call, residual=residual, maps=maps)
    *wide, wide_residual = (x.double() for x in tensors)
    expected = named(ikattn.contributions(*wide, residual=wide_residual))
    for name, map_ in named(found).items():
        assert_close(map_.cpu(), expected[name], 1e-5, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("heads", [12, 34])
def test_given_weights_may_be_of_any_size_and_sign(heads: int, dtype: torch.dtype) -> None:
    """Every pair by itself, as after dropout, or where others than attention made the weights."""
    torch.manual_seed(0)
    weights = (torch.randn(2, heads, 19, 45) * 2.0 ** torch.randint(-9, 9, (2, 1, 19, 45))).to(
        dtype
    )
    weights[:, :, :, 7] = 0
    value, projection = torch.randn(2, heads, 45, 3), torch.randn(30, 3 * heads)
    for step in (1, 2):  # keys that lie side by side, and others
        given, values = weights[..., ::step], value[:, :, ::step]
        call = (x.to(DEVICE) for x in (given, values, projection))
        found = ikattn.contributions(*call, maps=["summed"]).summed
        wide = (x.double() for x in (given, values, projection))
        expected = ikattn.contributions(*wide, maps=["summed"]).summed
        torch.testing.assert_close(found.cpu().double(), expected, rtol=3e-6, atol=0)


@pytest.mark.parametrize("heads", [64, 192])
def test_many_heads(heads: int) -> None:
    torch.manual_seed(0)
    weights = torch.rand(1, heads, 6, 40, dtype=torch.float64)
    value, projection = torch.randn(1, heads, 40, 2).double(), torch.randn(30, 2 * heads).double()

    def results(device: str) -> list[Tensor]:
        leaves = [x.to(device).requires_grad_() for x in (weights, value, projection)]
        norms = ikattn.contributions(*leaves, maps=["summed"]).summed
        return [x.cpu() for x in (norms, *torch.autograd.grad(norms.sum(), leaves))]

    for got, expected in zip(results(DEVICE), results("cpu"), strict=True):
        assert_close(got, expected, 1e-11)


# --- Maps from query and key by kernels of their own

# Tensor cores may round the few sums of float32 in a score towards zero.
TOWARDS_ZERO = 32 * torch.finfo(torch.float32).eps
WAYS = (
    "dot, causal",
    "dot, masked",
    "dot, masked by head",
    "dot, biased",
    "dot, biased pairs",
    "implicit, causal",
    "implicit, stationary",
    "implicit, few frequencies",
    "implicit, biased pairs",
)


def streamed_call(way: str, dtype: torch.dtype, heads: int = 4) -> dict[str, Any]:
    """Head sizes that are no multiple of 32, and rows that begin at no multiple of 16 bytes."""
    torch.manual_seed(0)
    tokens = {"query": (2, 50, heads, 20), "key": (2, 50, 2, 20), "value": (2, 50, 2, 20)}
    call: dict[str, Any] = {
        name: torch.randn(shape).transpose(1, 2) for name, shape in tokens.items()
    }
    call["out_proj_weight"] = torch.randn(24, 20 * heads) / 8
    if way.startswith("implicit"):
        call["w1"] = torch.randn(heads, 20, 4 if "few" in way else 9) / 5
    if way == "implicit, causal":
        call["w2"] = torch.randn(heads, 20, 9) / 5
    if way == "dot, biased":
        call |= {"key_bias": torch.randn(2, 2, 50), "attn_mask": torch.randn(2, heads, 1, 50)}
    if way.endswith("biased pairs"):
        call["attn_mask"] = torch.randn(2, 1, 50, 50)
        call["attn_mask"][torch.rand(2, 1, 50, 50) < 0.2] = -torch.inf
    call = {name: x.to(dtype) for name, x in call.items()}
    if way.startswith("dot, masked"):
        by_head = heads if way.endswith("head") else 1
        call["attn_mask"] = torch.rand(2, by_head, 50, 50) < 0.7
        call["attn_mask"][:, :, 7] = False
    return call | {"enable_gqa": True, "is_causal": "causal" in way}


def summed(call: dict[str, Any], **options: Any) -> Tensor:
    call = {"maps": ["summed"], **call, **options}
    map_ = ikattn.streamed_contributions(**on_gpu(call)).summed
    return map_.cpu()


def in_blocks(call: dict[str, Any]) -> Tensor:
    """Returns the map by torch's operators, whose bits differ from those of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        turn(patch, "-streamed_maps")
        return summed(call)


def composition(call: dict[str, Any]) -> Tensor:
    """The map as torch computes it in the type of the call, [B, T, S]."""
    heads = call["query"].size(1)
    value = call["value"].repeat_interleave(heads // 2, 1)
    projections = call["out_proj_weight"].unflatten(1, (heads, -1)).permute(1, 2, 0)
    if "w1" in call:
        given = {"w1", "w2", "is_causal", "enable_gqa", "attn_mask"} & call.keys()
        weights = ikattn.implicit_kernel_weights(
            call["query"], call["key"], **{name: call[name] for name in given}
        )
    else:
        key = call["key"].repeat_interleave(heads // 2, 1)
        logits = call["query"] @ key.mT * 20**-0.5
        if "key_bias" in call:
            logits = logits + call["key_bias"].repeat_interleave(heads // 2, 1).unsqueeze(-2)
        if "attn_mask" in call:
            mask = call["attn_mask"]
            hides = mask.dtype == torch.bool
            logits = logits.masked_fill(~mask, -torch.inf) if hides else logits + mask
        if call["is_causal"]:
            logits = logits.masked_fill(torch.ones(50, 50).triu(1).bool(), -torch.inf)
        blind = (logits == -torch.inf).all(-1, keepdim=True)
        weights = logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return torch.einsum("bhts,bhsd->btsd", weights, value @ projections).norm(dim=-1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_kernels_of_streamed_maps_are_as_accurate_as_the_composition(way, dtype):
    call = streamed_call(way, dtype)
    got = summed(call)
    assert not torch.equal(got, in_blocks(call))
    truth = composition({n: x.double() if _is_float(x) else x for n, x in call.items()})
    allowed = 2 * error(composition(call), truth) + TOWARDS_ZERO
    assert_close(got, truth, allowed)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


@pytest.mark.parametrize("heads", [2, 18, 34, 64])
@pytest.mark.parametrize("way", ["dot, causal", "implicit, causal"])
def test_all_maps_of_a_block_by_kernels(way: str, heads: int) -> None:
    call = streamed_call(way, torch.float32, heads)
    padding = torch.arange(50) >= torch.tensor([[50], [47]])
    residual = torch.randn(2, 50, 24)
    norms = [torch.nn.LayerNorm(24), torch.nn.RMSNorm(24)]
    stats = [ikattn.maps.NormStats.of(norm, residual) for norm in norms]
    call |= {"residual": residual, "norm": stats[0], "second_norm": stats[1]}
    call |= {"query_padding": padding, "key_padding": padding}
    call["maps"] = ["value_norms", "summed", "with_residual", "with_norm", "encoder"]
    call["maps"] += ["mixing_ratio"]
    got = named(ikattn.streamed_contributions(**on_gpu(call)))
    assert not torch.equal(got["summed"].cpu(), in_blocks(call))
    expected = named(ikattn.streamed_contributions(**call))
    assert got.keys() == expected.keys()
    for name, map_ in got.items():
        assert_close(map_.cpu(), expected[name], 5 * TOWARDS_ZERO, name)


@pytest.mark.parametrize("factor", [30.0, 1e4])
@pytest.mark.parametrize("way", ["causal", "hidden", "lowest bias"])
def test_magnitudes_may_differ_by_much(way: str, factor: float) -> None:
    call = streamed_call("implicit", torch.float32) | {"is_causal": way == "causal"}
    if way == "lowest bias":
        call["key_bias"] = torch.full((1, call["key"].size(2)), torch.finfo(torch.float32).min)
    else:
        call["key"][:, :, -3:] *= factor
    if way == "hidden":
        call["attn_mask"] = (torch.arange(50) < 47)[None, None, None]
    expected, found = in_blocks(call), summed(call)
    assert_close(found, expected, 3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_mixing_ratios_alone_by_kernels(dtype: torch.dtype) -> None:
    """Queries stand behind cached keys; a value that is not finite shows where it is weighed."""
    call = streamed_call("dot, masked", dtype)
    call["query"], call["attn_mask"] = call["query"][:, :, -9:], call["attn_mask"][:, :, -9:]
    call["value"][0, 1, 43, 2] = torch.inf  # the own key of query 2, and another's of others
    call |= {"diagonal": 41, "maps": ["mixing_ratio"], "residual": torch.randn(2, 9, 24)}
    found = ikattn.streamed_contributions(**on_gpu(call)).mixing_ratio
    expected = ikattn.streamed_contributions(**call).mixing_ratio
    assert found.keys() == expected.keys() == {"summed", "with_residual"}
    for name, ratio in found.items():
        assert torch.equal(ratio.cpu().isnan(), expected[name].isnan())
        assert expected[name].isnan().any()
        assert_close(ratio.cpu().nan_to_num(), expected[name].nan_to_num(), 5 * TOWARDS_ZERO)


@pytest.mark.parametrize("what", ["query", "key", "value", "key_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_nan_shows_where_it_does_in_blocks(what: str, dtype: torch.dtype) -> None:
    call = streamed_call("dot, causal", dtype) | {"key_bias": torch.zeros(2, 1, 50, dtype=dtype)}
    call[what][0, 0, 30] = torch.nan
    call["key_bias"][1] = -torch.inf  # a batch item that sees nothing
    kernels, blocks = summed(call), in_blocks(call)
    assert torch.equal(kernels.isnan(), blocks.isnan())
    assert blocks.isnan().any()


@pytest.mark.parametrize(
    "other", [{"heads": 66}, {"dtype": torch.float64}], ids=lambda other: ", ".join(other)
)
def test_what_kernels_of_streamed_maps_do_not_take_is_made_in_blocks(other: dict[str, Any]) -> None:
    other = dict(other)
    dtype, heads = other.pop("dtype", torch.float32), other.pop("heads", 4)
    call = {**streamed_call("dot, causal", dtype, heads), **other}
    assert torch.equal(summed(call), in_blocks(call))


# --- Their gradients by kernels


def gradients_of(map_: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Returns gradients of the sum of the map's elements, each times a number of its own."""
    incoming = torch.linspace(-1, 1, map_.numel()).view_as(map_)
    found = torch.autograd.grad(map_, leaves, incoming.to(map_.device, map_.dtype))
    return [x.detach().cpu() for x in found]


def leaves_of(call: dict[str, Any]) -> dict[str, Tensor]:
    return {n: x.detach().requires_grad_() for n, x in call.items() if _is_float(x)}


def kernel_gradients(call: dict[str, Any]) -> dict[str, Tensor]:
    leaves = leaves_of(on_gpu(call))
    call = {"maps": ["summed"], **on_gpu(call), **leaves}
    map_ = ikattn.streamed_contributions(**call).summed
    return dict(zip(leaves, gradients_of(map_, list(leaves.values())), strict=True))


def block_gradients(call: dict[str, Any]) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        turn(patch, "-streamed_maps")
        return kernel_gradients(call)


def composed_gradients(call: dict[str, Any]) -> dict[str, Tensor]:
    leaves = leaves_of(call)
    found = gradients_of(composition({**call, **leaves}), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_gradients_by_kernels_are_as_accurate_as_the_composition(way, dtype):
    call = streamed_call(way, dtype)
    got, composed = kernel_gradients(call), composed_gradients(call)
    wide = {n: x.double() if _is_float(x) else x for n, x in call.items()}
    for name, truth in composed_gradients(wide).items():
        assert got[name].dtype == dtype
        allowed = 5 * error(composed[name], truth) + TOWARDS_ZERO
        assert_close(got[name], truth, allowed, name)


def test_pairs_without_a_gradient_give_none() -> None:
    call = on_gpu(streamed_call("dot, causal", torch.float32))
    leaves = leaves_of(call)
    maps = ikattn.streamed_contributions(**call | leaves, maps=["value_norms", "summed"])
    found = torch.autograd.grad(maps.value_norms.sum(), [leaves["query"], leaves["key"]])
    assert all((gradient == 0).all() for gradient in found)


def test_a_head_without_weight_costs_the_others_no_digits() -> None:
    torch.manual_seed(0)
    weights, value = torch.rand(1, 3, 8, 8), torch.randn(1, 3, 8, 4)
    weights[:, 1] = 0
    value[:, 1] *= 2.0**40
    call = {"attn_weights": weights, "value": value, "out_proj_weight": torch.randn(12, 12)}
    found = ikattn.contributions(**on_gpu(call), maps=["summed"]).summed
    wide = {name: x.double() for name, x in call.items()}
    expected = ikattn.contributions(**wide, maps=["summed"]).summed
    assert_close(found.cpu(), expected, 4e-6)


@pytest.mark.parametrize("heads", [2, 18])
def test_gradients_of_all_maps_of_a_block_by_kernels(heads: int) -> None:
    call = streamed_call("dot, causal", torch.float32, heads)
    padding = torch.arange(50) >= torch.tensor([[50], [47]])
    residual = torch.randn(2, 50, 24)
    norms = [torch.nn.LayerNorm(24), torch.nn.RMSNorm(24)]
    stats = [ikattn.maps.NormStats.of(norm, residual) for norm in norms]
    call |= {"query_padding": padding, "key_padding": padding}
    call["query"][1, :, 48:] = torch.nan  # padding

    def results(device: str, setting: str) -> list[Tensor]:
        leaves = {
            name: x.detach().to(device).requires_grad_()
            for name, x in {**call, "residual": residual}.items()
            if _is_float(x)
        }
        others = {name: x.to(device) for name, x in call.items() if name.endswith("padding")}
        for name, norm in zip(("norm", "second_norm"), stats, strict=True):
            weight = norm.weight.detach().to(device).requires_grad_()
            leaves[name] = weight
            others[name] = ikattn.maps.NormStats(weight, norm.scale.to(device), norm.centered)
        inputs = {name: x for name, x in leaves.items() if name not in others}
        maps = ["value_norms", "summed", "with_residual", "with_norm", "encoder"]
        with pytest.MonkeyPatch.context() as patch:
            turn(patch, f"{setting}streamed_maps")
            made = ikattn.streamed_contributions(
                **inputs, **others, enable_gqa=True, is_causal=True, maps=maps
            )
            flat = torch.cat([x.flatten() for x in named(made).values()])
            return gradients_of(flat, list(leaves.values()))

    kernels, blocks = results(DEVICE, "+"), results(DEVICE, "-")
    assert not torch.equal(kernels[0], blocks[0])
    for got, expected in zip(kernels, results("cpu", "+"), strict=True):
        assert_close(got, expected, 2e-5)


def test_maps_and_gradients_for_queries_of_cached_keys_by_kernels() -> None:
    call = streamed_call("dot, masked", torch.float32)
    seen = torch.ones(50, 50, dtype=torch.bool).tril()
    call["attn_mask"] = (seen & ~seen.tril(-9))[-3:]  # a window
    call["key"][:, :, :30] = torch.nan  # hidden from all
    call["query"] = call["query"][:, :, -3:]
    call |= {"residual": torch.randn(2, 3, 24), "diagonal": 47, "maps": ["with_residual"]}

    def results(place: Any) -> list[Tensor]:
        leaves = leaves_of(place(call))
        map_ = ikattn.streamed_contributions(**{**place(call), **leaves}).with_residual
        return [map_.detach().cpu(), *gradients_of(map_, list(leaves.values()))]

    for got, expected in zip(results(on_gpu), results(dict), strict=True):
        assert_close(got, expected, 2e-5)


def test_gradients_of_rows_that_see_nan_are_nan_as_in_blocks() -> None:
    call = streamed_call("dot, causal", torch.float32)
    call["value"][0, 0, 30] = torch.nan
    kernels, blocks = kernel_gradients(call), block_gradients(call)
    for name in ("query", "value", "out_proj_weight"):
        assert blocks[name].isnan().any()
        assert torch.equal(kernels[name].isnan(), blocks[name].isnan()), name


def test_gradients_that_kernels_do_not_make_are_made_in_blocks() -> None:
    """The gradient of the divisor of a norm is one."""
    call = streamed_call("dot, causal", torch.float32)

    def gradient(setting: str) -> Tensor:
        scale = torch.rand(2, 50, device=DEVICE).add_(1).requires_grad_()
        norm = ikattn.maps.NormStats(torch.ones(24, device=DEVICE), scale, True)
        options = {"residual": torch.ones(2, 50, 24, device=DEVICE), "norm": norm}
        with pytest.MonkeyPatch.context() as patch:
            turn(patch, f"{setting}streamed_maps")
            map_ = ikattn.streamed_contributions(
                **on_gpu(call), **options, maps=["with_norm"]
            ).with_norm
            return torch.autograd.grad(map_.sum(), scale)[0].cpu()

    torch.manual_seed(1)
    kernels = gradient("+")
    torch.manual_seed(1)
    assert_close(kernels, gradient("-"), 2e-6)
