"""FSDP2 from the meta device, DDP with generated frequencies, and pipelines, in four processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

import sharded_programs
from agreement import assert_close
from processes import run_processes
from sharded_programs import GENERATED, SOURCES, Results, batch, make_encoder

TOLERANCE = 1e-12  # all of it in float64


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    return run_processes(sharded_programs.run, tmp_path_factory.mktemp("sharded"), 4)


def assert_same(found: Results, expected: Results, tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    scale = 1e-3 * max(x.abs().max().item() for x in expected.values())
    for name in expected:
        assert_close(found[name], expected[name], tolerance, name, scale)


@pytest.mark.parametrize("source", SOURCES)
def test_sharded_frequencies_are_drawn_as_in_one_process(
    source: str, results: list[dict[str, Any]]
) -> None:
    model = make_encoder(source)
    for layer in model.layers:
        layer.self_attn.reset_parameters()  # in float64; frequencies are those of the same seed
    expected = dict(model.named_parameters())
    for of_rank in results:
        assert of_rank[source]
        assert_same(of_rank[source], {name: expected[name] for name in of_rank[source]}, 0.0)


def test_what_four_ranks_save_two_load(results: list[dict[str, Any]]) -> None:
    model = make_encoder()
    expected = {"output": model(batch())} | dict(model.named_parameters())
    for of_rank in results[:2]:
        assert_same(of_rank["checkpoint"], expected)


@pytest.mark.parametrize("source", GENERATED)
def test_ddp_averages_over_the_noise_of_its_ranks(
    source: str, results: list[dict[str, Any]]
) -> None:
    expected = sharded_programs.train_with_noise(source, None)
    for of_rank in results:
        for what in expected:
            assert_same(of_rank[f"ddp, {source}"][what], expected[what])
    for what, first in results[0][f"ddp, {source}"].items():
        assert all(
            torch.equal(of_rank[f"ddp, {source}"][what][name], x)
            for of_rank in results
            for name, x in first.items()
        )


@pytest.mark.parametrize("way", ["stages", "traced"])
def test_a_pipeline_learns_what_one_process_does(way: str, results: list[dict[str, Any]]) -> None:
    model = make_encoder(layers=4)
    output = model(batch())
    nn.functional.mse_loss(output, torch.zeros_like(output)).backward()
    expected = {name: w.grad for name, w in model.named_parameters()}
    found = {name: x for of_rank in results for name, x in of_rank[way].items()}
    assert_same(found, expected | {"output": output.detach()})
