"""Two processes train converted models to what one process gets: DDP and FSDP2, over gloo."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed_programs
from agreement import assert_close
from distributed_programs import (
    GENERATED,
    PARTS,
    PROCESSES,
    Parameters,
    evaluate_generated,
    make_model,
    train,
)
from processes import run_processes

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

TOLERANCE = 1e-11  # all of it in float64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_processes(distributed_programs.run, folder, PROCESSES)


@pytest.fixture(scope="module")
def alone() -> dict[str, Parameters]:
    """Returns the result of one process for the whole batch."""
    return train(make_model(), slice(None))


def assert_same(found: Parameters, expected: Parameters, tolerance: float = TOLERANCE) -> None:
    found = {name.removeprefix("module."): x for name, x in found.items()}
    assert found.keys() == expected.keys()
    for name in expected:
        scale = 1e-3 * max(x.abs().max().item() for x in expected.values())
        assert_close(found[name], expected[name], tolerance, name, scale)


@pytest.mark.parametrize("way", ["ddp", *(f"fsdp, {part}" for part in PARTS)])
def test_gradients_and_what_is_learned_are_those_of_one_process(way, results, alone):
    start = dict(make_model().named_parameters())
    assert all((w != start[name]).any() for name, w in alone["parameters"].items())
    assert any(alone["gradients"][f"layers.{i}.self_attn.spectral.w1"].any() for i in range(2))
    for of_rank in results:
        assert_same(of_rank[way]["gradients"], alone["gradients"])
        assert_same(of_rank[way]["parameters"], alone["parameters"])


@pytest.mark.parametrize("part", PARTS)
def test_shares_and_checkpoints_of_them_make_up_the_whole(part, results, alone, folder):
    shares = [of_rank[f"fsdp, {part}"]["share of w1"][""] for of_rank in results]
    whole = alone["parameters"]["layers.0.self_attn.spectral.w1"]
    assert all(share.numel() < whole.numel() for share in shares)
    assert_close(torch.cat(shares), whole, TOLERANCE)
    plain: nn.Module = make_model(seed=1)
    for of_rank in results:
        found = of_rank[f"fsdp, {part}"]
        plain.load_state_dict(found["state"])
        assert_same(dict(plain.named_parameters()), alone["parameters"])
        assert_same(found["set again"], alone["parameters"])
    plain = make_model(seed=1)  # which loads the checkpoint of shards
    state = plain.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        torch.distributed.checkpoint.load(state, checkpoint_id=folder / part, no_dist=True)
    plain.load_state_dict(state)
    assert_same(dict(plain.named_parameters()), alone["parameters"])


def test_sharded_parameters_compute_in_bfloat16(results, alone):
    for of_rank in results:
        found = of_rank["fsdp, bfloat16"]
        assert_same(found["parameters"], alone["parameters"], 0.05)
        errors = [(x - alone["parameters"][name]) for name, x in found["parameters"].items()]
        assert any(error.any() for error in errors)


@pytest.mark.parametrize("source", GENERATED)
def test_sharded_generators_compute_in_bfloat16(source: str, results: list[dict[str, Any]]) -> None:
    expected = evaluate_generated(source)
    for of_rank in results:
        found = of_rank[f"fsdp, bfloat16, {source}"]
        assert_close(found["output"], expected["output"], 0.05, source)
        assert (found["gradients"] > 0).sum() == (expected["gradients"] > 0).sum()
