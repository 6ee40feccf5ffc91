"""The contribution operators against their definition: values, gradients, laws, transformations."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, error
from contribution_samples import (
    BLOCK,
    PADDED,
    SAMPLES,
    Sample,
    definition,
    maps_of,
    named,
    norm_of,
    operator_call,
    replaced,
    vectors,
)
from golden import golden_files, load_golden
from ikattn.maps import Contributions, NormStats

# --- Values


@pytest.mark.parametrize("factor", [1e35, 1e30, 1e19, 1e-16, 1e-30])
@pytest.mark.parametrize("H", [2, 12, 17])
def test_norms_are_right_where_their_squares_leave_the_range_of_float32(H, factor):
    torch.manual_seed(0)
    weights, value = torch.rand(1, H, 3, 70), factor * torch.randn(1, H, 70, 3)
    value[..., 3, :] /= factor  # one key of ordinary size among them
    projection = torch.randn(8, 3 * H)
    tensors = weights, value, projection
    maps = ("value_norms", "summed")
    found = ikattn.contributions(*tensors, maps=maps)
    expected = ikattn.contributions(*(x.double() for x in tensors), maps=maps)
    if factor > 1e-19:  # below, squares of sums vanish
        assert_close(found.summed, expected.summed, 1e-6, "summed")
    assert_close(found.value_norms, expected.value_norms, 1e-6, "value_norms")
    assert found.summed.isfinite().all()


def test_own_pairs_and_ratios_are_right_where_squares_leave_the_range_of_float32() -> None:
    torch.manual_seed(0)
    weights, value = torch.rand(1, 3, 9, 9), torch.randn(1, 3, 9, 4)
    projection, residual = torch.randn(8, 12), torch.randn(1, 9, 8)
    found, expected = (
        ikattn.contributions(weights, factor * value, projection, residual=factor * residual)
        for factor in (2.0**80, 1.0)
    )
    assert_close(found.with_residual / 2.0**80, expected.with_residual, 1e-6)
    for name, ratio in expected.mixing_ratio.items():
        assert_close(found.mixing_ratio[name], ratio, 1e-6, name)


@pytest.mark.parametrize("cancellation", [1e-3, 1e-4])
def test_heads_that_cancel_keep_their_accuracy_in_float32(cancellation: float) -> None:
    """The sum is a thousandth, or less, of its parts; the Gram form would be wrong altogether."""
    torch.manual_seed(0)
    H, D, S = 12, 64, 40
    parts = torch.randn(1, H, S, D, dtype=torch.float64)
    parts[:, -1] = cancellation * parts[:, -1] - parts[:, :-1].sum(1)
    call = {
        "attn_weights": torch.full((1, H, S, S), 1 / 64),
        "value": parts.float(),
        "out_proj_weight": torch.eye(D).repeat(1, H),
        "diagonal": 0,
    }
    truth = norm_of(vectors(call)["summed"])
    size = norm_of(call["value"]).sum(1)[0] / 64
    assert (truth[0, 0] / size).max() < 10 * cancellation
    got = ikattn.contributions(**call, maps=["summed"]).summed
    relative = ((got - truth) / truth).abs().max().item()
    assert relative < 1e-3 * max(1.0, 1e-3 / cancellation)


def test_maps_print_their_shapes() -> None:
    maps = Contributions(summed=torch.ones(2, 5, 5), mixing_ratio={"summed": torch.ones(2, 5)})
    assert repr(maps) == "Contributions(summed: [2, 5, 5], mixing_ratio of summed)"


@pytest.mark.parametrize("layer", [path.stem for path in golden_files("bert_inputs", "op_*.npz")])
def test_one_layer_equals_the_authors_code(layer: str) -> None:
    golden = load_golden("bert_inputs", layer)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        tensors = {
            name: torch.from_numpy(array).to(dtype)
            for name, array in golden.items()
            if array.dtype.kind == "f"
        }
        norms = []
        for name in ("ln1", "ln2"):
            x = tensors[f"pre_{name}"]
            scale = (x.var(-1, correction=0) + tensors["eps"]).sqrt()
            norms.append(NormStats(tensors[f"{name}_weight"], scale))
        maps = ikattn.contributions(
            tensors["attn"],
            tensors["v"],
            tensors["W_O"],
            residual=tensors["x"],
            norm=norms[0],
            second_norm=norms[1],
            per_head=True,
        )
        pairs = {
            "f_norm": maps.value_norms,
            "af_norm": maps.per_head,
            "sum_af_norm": maps.summed,
            "attnres_n": maps.with_residual,
            "attnresln_n": maps.with_norm,
            "n_enc": maps.encoder,
            "attn_n_ratio": maps.mixing_ratio["summed"],
            "attnres_n_ratio": maps.mixing_ratio["with_residual"],
            "attnresln_n_ratio": maps.mixing_ratio["with_norm"],
            "n_enc_ratio": maps.mixing_ratio["encoder"],
        }
        for name, map_ in pairs.items():
            assert_close(map_, torch.from_numpy(golden[name]), tolerance, f"{name} in {dtype}")


# --- Laws


def test_what_padding_holds_never_shows() -> None:
    arguments = PADDED.arguments()
    expected = named(maps_of(arguments))
    query, key = arguments["query_padding"], arguments["key_padding"]
    nan = math.nan
    spoiled = replaced(
        arguments,
        {
            "attn_weights": arguments["attn_weights"]
            .masked_fill(query[:, None, :, None], nan)
            .masked_fill(key[:, None, None, :], nan),
            "value": arguments["value"].masked_fill(key[:, None, :, None], nan),
            "residual": arguments["residual"].masked_fill(query[..., None], nan),
            "norm.scale": arguments["norm"].scale.masked_fill(query, nan),
        },
    )
    for name, map_ in named(maps_of(spoiled)).items():
        assert torch.equal(map_, expected[name]), name


def test_nan_in_a_visible_value_shows_where_it_is_weighed() -> None:
    arguments = Sample("causal", causal=True, L=6, S=6, steps=0).arguments()
    arguments["value"][0, 1, 4] = math.nan
    summed = maps_of(arguments).summed
    assert summed[0, 4:, 4].isnan().all()
    summed[0, 4:, 4] = 0
    assert summed.isfinite().all()


def test_strides_do_not_matter() -> None:
    arguments = BLOCK.arguments(torch.float32)
    expected = named(maps_of(arguments))
    strided = {
        "attn_weights": arguments["attn_weights"].mT.contiguous().mT,
        "value": arguments["value"].mT.contiguous().mT,
        "out_proj_weight": arguments["out_proj_weight"].T.contiguous().T,
        "residual": torch.stack([arguments["residual"]] * 2, -1)[..., 1],
    }
    for name, map_ in named(maps_of(arguments | strided)).items():
        assert_close(map_, expected[name], 1e-6, name)


def test_weights_of_one_type_and_values_of_another() -> None:
    """Autocast leaves softmax in float32, projections in bfloat16."""
    arguments = BLOCK.arguments(torch.bfloat16)
    arguments["attn_weights"] = arguments["attn_weights"].float()
    assert_close(maps_of(arguments).encoder, definition(arguments).encoder, 2e-6)


def test_threads_do_not_disturb_each_other() -> None:
    calls = [sample.arguments(torch.float32) for sample in SAMPLES] * 3
    expected = [named(maps_of(call)) for call in calls]
    with ThreadPoolExecutor(8) as pool:
        for got, alone in zip(pool.map(maps_of, calls), expected, strict=True):
            assert all(error(map_, alone[name]) < 1e-6 for name, map_ in named(got).items())


def test_only_the_maps_asked_for_are_there() -> None:
    arguments = BLOCK.arguments()
    maps = ikattn.contributions(**arguments, maps=["with_norm"])
    assert list(named(maps)) == ["with_norm"]
    maps = ikattn.contributions(**arguments, maps=["per_head", "mixing_ratio"])
    assert list(named(maps)) == ["per_head"] + [
        f"mixing_ratio.{name}" for name in ("summed", "with_residual", "with_norm", "encoder")
    ]


# --- Transformations


@pytest.mark.parametrize("sample", [BLOCK, PADDED], ids=lambda sample: sample.name)
def test_opcheck_of_given_weights(sample: Sample) -> None:
    positional, named_ = operator_call(sample)
    for tensor in (*positional, named_["residual"]):
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.ikattn.contribution_maps, positional, named_)


def test_torch_compile_keeps_values_and_gradients() -> None:
    def loss(weights: Tensor, value: Tensor, projection: Tensor, residual: Tensor) -> Tensor:
        maps = ikattn.contributions(weights, value, projection, residual=residual)
        return maps.with_residual.sum() + maps.mixing_ratio["summed"].sum()  # type: ignore[union-attr]

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for sample in (Sample("a", steps=1), Sample("b", B=3, L=9, S=9, steps=1)):
        arguments = sample.arguments()
        leaves = [
            arguments[name].requires_grad_()
            for name in ("attn_weights", "value", "out_proj_weight", "residual")
        ]
        expected, got = loss(*leaves), compiled(*leaves)
        assert_close(got, expected, 1e-13)
        for a, b in zip(
            torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True
        ):
            assert_close(a, b, 1e-12)


def test_torch_func_sees_through() -> None:
    arguments = Sample("small", B=2, L=3, S=3, steps=1).arguments()
    rest = (arguments["value"], arguments["out_proj_weight"])

    def total(weights: Tensor, value: Tensor) -> Tensor:
        maps = ikattn.contributions(weights, value, rest[1], residual=arguments["residual"])
        return maps.with_residual.square().sum()

    weights = arguments["attn_weights"]
    leaf = weights.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf, rest[0]), leaf)
    assert_close(torch.func.grad(total)(weights, rest[0]), expected, 1e-10)
    tangent = torch.randn_like(weights)
    _, derivative = torch.func.jvp(lambda w: total(w, rest[0]), (weights,), (tangent,))
    assert_close(derivative, (expected * tangent).sum(), 1e-10)
    stacked = torch.stack([weights, weights.flip(0)])
    each = torch.vmap(lambda w: total(w, rest[0]))(stacked)
    assert_close(each, torch.stack([total(w, rest[0]) for w in stacked]), 1e-10)
