"""FSDP2 from the meta device, DDP with generated frequencies, and pipelines, in four processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

import sharded_programs
from agreement import assert_all_close
from processes import run_processes
from sharded_programs import GENERATED, SOURCES, batch, make_encoder, whole


def test_one_process_draws_sharded_frequencies_as_plain_ones() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, plain = make_encoder("mikan"), make_encoder("mikan")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with torch.no_grad():
            for w in model.parameters():
                w.fill_(7.0)
        for of in (model, plain):
            of.layers[1].self_attn.spectral.reset_parameters()
        found, expected = (of.layers[1].self_attn.spectral for of in (model, plain))
        assert_all_close(
            {name: whole(w) for name, w in found.named_parameters()},
            dict(expected.named_parameters()),
            0.0,
        )
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(sharded_programs.run, tmp_path_factory.mktemp("sharded"), 4)


@pytest.mark.parametrize("source", SOURCES)
def test_sharded_frequencies_are_drawn_as_in_one_process(source, results):
    model = make_encoder(source)
    for layer in model.layers:
        layer.self_attn.reset_parameters()  # in float64; frequencies are those of the same seed
    expected = dict(model.named_parameters())
    for of_rank in results:
        assert of_rank[source]
        assert_all_close(of_rank[source], {name: expected[name] for name in of_rank[source]}, 0.0)


def test_what_four_ranks_save_two_load(results: list[dict[str, Any]]) -> None:
    model = make_encoder()
    expected = {"output": model(batch())} | dict(model.named_parameters())
    for of_rank in results[:2]:
        assert_all_close(of_rank["checkpoint"], expected)


@pytest.mark.parametrize("source", GENERATED)
def test_ddp_averages_over_the_noise_of_its_ranks(source, results):
    expected = sharded_programs.train_with_noise(source, None)
    for of_rank in results:
        for what in expected:
            assert_all_close(of_rank[f"ddp, {source}"][what], expected[what])
    for what, first in results[0][f"ddp, {source}"].items():
        assert all(
            torch.equal(of_rank[f"ddp, {source}"][what][name], x)
            for of_rank in results
            for name, x in first.items()
        )


def test_models_are_not_converted_when_they_are_wrapped(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        messages = of_rank["errors"]
        assert "got DistributedDataParallel around it, which would not keep" in messages["ddp"]
        assert "got FSDPModule around 0, which would not keep new frequ" in messages["fsdp"]


@pytest.mark.parametrize("way", ["stages", "traced"])
def test_a_pipeline_learns_what_one_process_does(way: str, results: list[dict[str, Any]]) -> None:
    model = make_encoder(layers=4)
    output = model(batch())
    nn.functional.mse_loss(output, torch.zeros_like(output)).backward()
    expected = {name: w.grad for name, w in model.named_parameters()}
    found = {name: x for of_rank in results for name, x in of_rank[way].items()}
    assert_all_close(found, expected | {"output": output.detach()})
