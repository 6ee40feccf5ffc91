"""Two and four processes share out heads and compute what one process does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

import head_programs
import ikattn
from agreement import assert_all_close, assert_close
from head_programs import MODULES, RANKS, E, H, L, M, N
from ikattn.parallel import HeadParallel, tensor_parallel_plan
from processes import run_processes

TOLERANCE = 1e-12  # all of it in float64


def test_a_plan_names_what_this_package_knows() -> None:
    layer = nn.TransformerEncoderLayer(E, H, batch_first=True)
    model = ikattn.convert(nn.TransformerEncoder(layer, 2), select="layers.1.*")
    plan = tensor_parallel_plan(model)
    assert list(plan) == ["layers.1.self_attn"]
    assert isinstance(plan["layers.1.self_attn"], HeadParallel)
    assert list(tensor_parallel_plan(ikattn.MultiheadAttention(E, H))) == [""]
    with pytest.raises(ValueError, match=r"expected a model with ikattn\.MultiheadAttention"):
        tensor_parallel_plan(nn.MultiheadAttention(E, H))
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got dict"):
        tensor_parallel_plan({})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_processes(head_programs.run, folder, 4)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODULES)
def test_ranks_compute_what_one_process_does(name, ranks, results):
    expected = head_programs.evaluate(head_programs.make_module(name), per_head=ranks == 4)
    for of_rank in results:
        assert_all_close(of_rank[f"{name}, {ranks}"], expected)


@pytest.mark.parametrize("way", ["encoder", "with fsdp"])
def test_an_encoder_trains_to_what_one_process_gets(way, results):
    expected = head_programs.train(head_programs.make_encoder())
    assert expected["gradient of layers.0.self_attn.spectral.w1"].any()
    for of_rank in results:
        assert_all_close(of_rank[way], expected, 1e-9)  # AdamW divides by small numbers


def test_the_first_ranks_parameters_and_noise_count(results: list[dict[str, Any]]) -> None:
    for source, expected in results[0]["seeds"].items():
        for of_rank in results:
            found = of_rank["seeds"][source]
            assert_all_close(found["after"], expected["before"], 0.0)
            assert torch.equal(found["output"], expected["output"])
        assert any(
            not torch.equal(results[1]["seeds"][source]["before"][name], expected["before"][name])
            for name in expected["before"]
        )


@pytest.mark.parametrize("name", ["direct", "dot"])
def test_every_head_has_dropout_of_its_own(name: str, results: list[dict[str, Any]]) -> None:
    first = results[0]["dropout"][name]
    kept = first["weights"].movedim(1, 0) != 0  # [H, N, L, S]
    for a, b in itertools.combinations(kept, 2):
        assert 0.4 < (a == b).double().mean() < 0.6
    for of_head in kept:
        assert 0.4 < of_head.double().mean() < 0.6
    for of_rank in results:
        assert all(torch.equal(of_rank["dropout"][name][what], first[what]) for what in first)
    if name == "direct":  # the mask of one process
        alone = head_programs.dropped(head_programs.make_module(name, dropout=0.5))
        for what, expected in alone.items():
            assert_close(first[what], expected, TOLERANCE, what)


def test_parameters_on_meta_are_drawn_as_by_one_process(results: list[dict[str, Any]]) -> None:
    for name, found in results[0]["reset"].items():
        module = head_programs.make_module(name)
        torch.manual_seed(5)
        module.reset_parameters()
        for of_rank in results:
            assert_all_close(of_rank["reset"][name], head_programs.whole_state(module), 0.0)
        assert found
    module = head_programs.make_module("direct")
    torch.manual_seed(5)
    module.reset_parameters()
    for of_rank in results:
        assert_all_close(of_rank["reset with fsdp"], head_programs.whole_state(module), 0.0)


def test_one_sum_is_sent_each_way(results: list[dict[str, Any]]) -> None:
    """Besides what heads have in common: the bias of the in-projection, and what generators do."""
    tokens, bias, noise = (("all_reduce", N * L * E), ("all_reduce", 3 * E), E * M)
    averages = ("all_gather_into_tensor", N * E // 4)
    for of_rank in results:
        sent = of_rank["sent"]
        assert sent["direct"] == {"forward": [tokens], "backward": sorted([tokens, bias])}
        assert sent["ikan"]["forward"] == [("broadcast", noise), tokens]
        assert sent["mikan"]["forward"] == [averages] * 2 + [("broadcast", N * noise), tokens]


def test_a_compiled_call_is_the_same(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for what in ("output", "gradient"):
            found, expected = (
                of_rank["compiled"][f"{way} {what}"] for way in ("compiled", "ordinary")
            )
            assert_close(found, expected, TOLERANCE)


@pytest.mark.usefixtures("results")
def test_a_checkpoint_of_four_ranks_loads_on_two_and_on_one(results, folder):
    expected = dict(head_programs.make_encoder().named_parameters())
    for of_rank in results:
        assert_all_close(of_rank["checkpoint"], expected, 0.0)
    whole = folder / "whole.pt"
    dcp_to_torch_save(folder / "checkpoint", whole)
    plain = head_programs.make_encoder()
    with torch.no_grad():
        for w in plain.parameters():
            w.zero_()
    plain.load_state_dict(torch.load(whole))
    assert_all_close(dict(plain.named_parameters()), expected, 0.0)


ERRORS = {
    "heads": "ValueError: HeadParallel: expected a number of ranks that divides the 6 heads, got 4",
    "mesh": "ValueError: HeadParallel: heads are shared out over a mesh of one dimension, such as",
    "stock": "TypeError: HeadParallel: expected an ikattn.MultiheadAttention that nobody has",
    "own source": "ValueError: tensor parallelism: frequencies must come from ikattn.spectral.Dir",
    "faithful": "ValueError: tensor parallelism: Mikan(faithful='code') draws as one process",
    "sharded": "TypeError: HeadParallel: expected an ikattn.MultiheadAttention that nobody has",
    "set_kernel": "RuntimeError: set_kernel: the heads of this module are shared out over ranks",
    "remove_kernel": "RuntimeError: set_kernel: the heads of this module are shared out over ranks",
    "DTensor": "TypeError: MultiheadAttention under HeadParallel: query must be a plain tensor",
    "sizes": "AssertionError: was expecting embedding dimension of 16, but got 15",
    "mask": "RuntimeError: The shape of the 3D attn_mask is torch.Size([1, 5, 5]), but should be",
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_cannot_be_is_refused_on_every_rank(what: str, results: list[dict[str, Any]]) -> None:
    assert results[0]["errors"].keys() == ERRORS.keys()
    for of_rank in results:
        assert of_rank["errors"][what].startswith(ERRORS[what])


def test_separate_weights_of_a_checkpoint_load_as_a_packed_one() -> None:
    module = ikattn.MultiheadAttention(E, H, num_frequencies=M)
    state = module.state_dict()
    parts = state.pop("in_proj_weight").clone().chunk(3)
    state |= {f"{name}_proj_weight": part for name, part in zip("qkv", parts, strict=True)}
    other = ikattn.MultiheadAttention(E, H, num_frequencies=M)
    other.load_state_dict(state)
    x = torch.randn(L, N, E)
    assert torch.equal(other(x, x, x)[0], module(x, x, x)[0])
